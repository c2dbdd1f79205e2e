"""The tables at the sizes of the paper: which recipes each of them needs, what they cost, and the runs on disk."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path

from contextready.errors import ContextReadyError
from contextready.paper.tables import NAMES, figures_of
from contextready.reproduce.records import check_data, is_finished
from contextready.runs.authors import SWITCH
from contextready.runs.checkpoint import newest_checkpoint
from contextready.runs.config import RunConfig
from contextready.runs.recipes import paper_experiments, resolve
from contextready.study.results import newest_step
from contextready.train import trials
from contextready.train.cost import run_macs
from contextready.train.jobs import Job
from contextready.train.trials import aligned, with_changes

TABLES = tuple(name for name in NAMES if name not in ("timing", "hyperparameters"))
"""The tables that need training."""
AS_RUN = f"{SWITCH}=true"
"""Every run has the settings of the author's own runs, unless the user says authors=false."""


@dataclass(frozen=True)
class PaperRun(trials.Trial):
    """A run at the size of the paper."""

    start: str | None = None
    """The run that it is converted from."""

    @property
    def model(self) -> str:
        """The paper's model."""
        return self.recipe.partition("/")[2]

    def words(self, seed: int, out: Path) -> tuple[str, ...]:
        """The arguments of the command that trains it."""
        origin = () if self.start is None else (f"init_from={out / f'{self.start}-seed{seed}'}",)
        return (*super().words(seed, out), *origin)


def _run(recipe: str, *settings: str, start: str | None = None) -> PaperRun:
    experiment, _, model = recipe.partition("/")
    key = "-".join((experiment, model, *(word.replace("=", "") for word in settings)))
    name = " ".join((recipe, *settings))
    return PaperRun(key, name, experiment, recipe, (AS_RUN, *settings), start)


def _all_of(experiment: str) -> list[PaperRun]:
    return [_run(f"{experiment}/{model}") for model in paper_experiments()[experiment]["models"]]


def _wikipedia(*models: str) -> list[PaperRun]:
    return [_run(f"wikipedia/wiki-{model}") for model in models]


def _converted(experiment: str, start: str, model: str) -> PaperRun:
    return _run(f"{experiment}/{model}", start=f"{start}-{model.replace('-d', '-n')}")


def _token_matched() -> list[PaperRun]:
    starts = _all_of("token-matched-start")
    models = paper_experiments()["token-matched"]["models"]
    return starts + [
        _converted("token-matched", "token-matched-start", model) if "-d" in model else _run(f"token-matched/{model}")
        for model in models
    ]


def _runs() -> dict[str, list[PaperRun]]:
    one_layer = [_run(f"block-{t}/owt-d1-c2048") for t in (256, 512, 1024)]
    deep = [
        _run(f"{name}") for name in ("main-85m/owt-d5-c1024", "efficiency/owt-d12-c1024", "efficiency/owt-d23-c1024")
    ]
    tuned = _run("k10-finetune/owt-d1-c2048", start="k10-pretrain-owt-n1-c2048")
    random_depth = _run("wikipedia-k10/wiki-d1-c50-blind")
    return {
        "main": [run for run in _all_of("main-85m") if run.model not in ("owt-d5-c1024", "owt-d8-c768")]
        + _all_of("main-340m"),
        "efficiency": _all_of("efficiency"),
        "width": _all_of("width"),
        "d1": [*_all_of("k10-fixed"), *_all_of("k10-random"), *_all_of("k10-pretrain"), tuned],
        "pointer": [run for run in _all_of("pointer") if run.model.endswith("c256")],
        "seq": [*one_layer, *deep],
        "pointer-wave": [_run("pointer/pointer-d1-c128")],
        "correction": _wikipedia("d3-c446-blind", "n3-c446-hffn", "d3-c446-block_head", "n3-c446", "d1-c50-tied"),
        "variants": _wikipedia(*(f"d{d}-c446{end}" for d in (2, 3) for end in ("-blind", "", "-concat"))),
        "scale": _wikipedia(
            *("d3-c50-blind", "n3-c50-hffn", "d3-c74-blind", "n3-c74-hffn", "d3-c446", "n4-c446", "d3-c768", "n4-c768")
        ),
        "k_min": [random_depth, _run(random_depth.recipe, "passes=10")],
        "k10": _all_of("k10-fixed"),
        "depth-d1": one_layer,
        "depth-deep": [deep[0], _run("main-85m/owt-d8-c768"), *deep[1:]],
        "block-size": [run for t in (256, 512, 1024) for run in _all_of(f"block-{t}")],
        "token-matched": _token_matched(),
        "fine-tuning": [
            *_all_of("pretrain"),
            *(_converted("finetune", "pretrain", model) for model in paper_experiments()["finetune"]["models"]),
        ],
        "wikipedia": _wikipedia(*("d5-c768-concat", "n6-c768", "d6-c446", "n6-c446-hffn", "d2-c446-concat", "n3-c446")),
    }


def runs_of(tables: Sequence[str]) -> list[PaperRun]:
    """Return the runs behind these tables, each one once, and each after the run that it starts from."""
    of_table = _runs()
    found = {run.key: run for table in tables for run in of_table.get(table, [])}
    return sorted(found.values(), key=lambda run: run.start is not None)


def config_of(run: PaperRun, changes: Sequence[str] = (), seed: int = 0, out: Path = Path("runs")) -> RunConfig:
    """Return the settings of a run, without the run that it starts from, which may not exist yet."""
    words = with_changes(run.words(seed, out), changes)
    if run.start is not None:
        words = (*(word for word in words if not word.startswith("init_from=")), "init_from=none")
    return resolve(words[0], words[1:])


def jobs_of(
    tables: Sequence[str], seeds: Sequence[int], out: Path, changes: Sequence[str], missing_ok: bool = False
) -> tuple[list[Job], int]:
    """List the runs that are not finished yet, and count all of them. With `missing_ok`, the data may be missing."""
    if any(word.startswith(("out=", "seed=", "init_from=")) for word in changes):
        raise ContextReadyError("out, seed and init_from cannot be set here; use --out and --seeds.")
    jobs, runs = [], runs_of(tables)
    for seed in seeds:
        for run in runs:
            config, folder = config_of(run, changes, seed, out), run.folder(seed, out)
            made = newest_checkpoint(folder)
            done = 0 if made is None else int(made.name.removeprefix("step-"))
            if made is not None and is_finished(folder):
                continue
            words = with_changes(run.words(seed, out), changes)
            if config.task is None and not missing_ok:
                check_data(words, config)
            left = run_macs(config, done)
            after = None if run.start is None else out / f"{run.start}-seed{seed}"
            verb = "pointer" if config.task is not None else "train"
            words_of_run = with_changes(run.words(seed, out), changes)
            jobs.append(Job(f"{run.name}, seed {seed}", folder, (verb, *words_of_run), config.train.steps, after, left))
    return jobs, len(runs) * len(seeds)


def finished_runs(tables: Sequence[str], out: Path) -> list[tuple[PaperRun, int]]:
    """List the runs of these tables in a folder that have made all their steps."""
    return [(run, seed) for run in runs_of(tables) for seed in run.seeds(out) if is_finished(run.folder(seed, out))]


def as_markdown(tables: Sequence[str], out: Path) -> str:
    """The finished runs with their last validation, and what the paper prints for the model."""
    lines = [["run", "seed", "steps", "validation perplexity", "printed in the paper"]]
    for run, seed in finished_runs(tables, out):
        step, loss = newest_step(run.folder(seed, out))
        printed = [
            f"{heading} {figure} ({one.table.name})"
            for one in figures_of(run.model)
            if one.table.name in tables
            for heading, figure in one.perplexities.items()
        ]
        perplexity = "" if loss is None else f"{exp(min(loss, 700.0)):.2f}"
        lines.append([run.name, str(seed), f"{step:,}", perplexity, ", ".join(printed)])
    return aligned(lines)


@dataclass(frozen=True)
class TableCost:
    """What one table costs at the sizes of the paper."""

    table: str
    runs: int
    new: int
    """Runs that no table before it has."""
    flops: float
    """Those of the new runs, counting a multiply-accumulate as two."""


def costs(tables: Sequence[str]) -> list[TableCost]:
    """Return what every table adds to the cost of those before it."""
    known: set[str] = set()
    found = []
    for table in tables:
        runs = runs_of([table])
        new = [run for run in runs if run.key not in known]
        known |= {run.key for run in new}
        found.append(TableCost(table, len(runs), len(new), sum(2.0 * run_macs(config_of(run)) for run in new)))
    return found
