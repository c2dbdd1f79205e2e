"""Evaluation with lm-evaluation-harness, on its own tasks, on tasks in YAML files, or on local files only.

`lambada=FILE`, `arc_easy=FILE` and `bits=FILE` need no network. The folder `TASKS` describes them, with the prompts and
metrics of lm_eval's lambada_openai, arc_easy and wikitext. To use them with the `lm_eval` command itself, create a
folder with a YAML file such as

    include: /…/contextready/evaluate/tasks/lambada.yaml
    task: lambada_local
    dataset_kwargs: {data_files: {test: /data/lambada_test.jsonl}}

and run `lm_eval run --model hf --model_args pretrained=MODEL,trust_remote_code=True --include_path FOLDER --tasks
lambada_local`. In both cases, a text longer than the model's maximum context is truncated at its beginning.
"""

import io
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from contextready.data.corpora import expand, open_corpus
from contextready.errors import ContextReadyError, nearest
from contextready.extras import require

TASKS = Path(__file__).parent / "tasks"
"""Folder with the descriptions of the tasks that need only a local file."""
RESAMPLES = 1000
"""Bootstrap resamples for standard errors that have no closed form."""


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task."""

    task: str
    metric: str
    value: float
    stderr: float | None
    """None if lm_eval does not report one."""
    higher_is_better: bool | None
    documents: int | None
    """Number of scored documents; None for a group of tasks."""

    def as_record(self) -> dict[str, Any]:
        """The score as plain JSON values."""
        return asdict(self)


def open_tasks(tasks: Sequence[str], include: Path | None = None, shots: int | None = None) -> list[Any]:
    """Open lm_eval tasks and groups with their data, so that errors are reported before a model is loaded.

    tasks     names of lm_eval tasks, or `lambada=FILE`, `arc_easy=FILE`, `bits=FILE`
    include   folder with more task descriptions (YAML)
    shots     examples shown before each question (default: as the task specifies)
    """
    require("lm_eval", "eval")
    if not any(tasks):
        raise ContextReadyError("--tasks names no task; give for example lambada_openai,arc_easy or lambada=FILE.")
    if include is not None and not any(include.rglob("*.yaml")):
        raise ContextReadyError(f"--tasks-path must be a folder with task descriptions (.yaml), but got {include}.")
    with _quiet():
        from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]

        # Its thousands of files take ten seconds to read, so they are read only if one of them may be needed.
        manager = TaskManager(include_path=include, include_defaults=not all("=" in spec for spec in tasks))
        opened: dict[str, Any] = {}
        for spec in tasks:
            for one in _open(manager, spec, shots):
                name = getattr(one, "task_name", None) or one.name
                if name in opened:
                    raise ContextReadyError(f"The task {name} is listed twice; list each task once.")
                opened[name] = one
    return list(opened.values())


def score(
    model: Any, tokenizer: Any, tasks: Sequence[Any], *, limit: int | None = None, batch_size: int = 8
) -> list[TaskScore]:
    """Score one causal language model in memory on tasks from `open_tasks`.

    limit        score only the first `limit` documents of each task
    batch_size   number of texts scored at once
    """
    with _quiet():
        from lm_eval import simple_evaluate  # type: ignore[import-untyped]
        from lm_eval.models.huggingface import HFLM  # type: ignore[import-untyped]
        from lm_eval.tasks import TaskManager

        lm = HFLM(
            pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size, trust_remote_code=False
        )
        try:
            results = simple_evaluate(
                lm,
                tasks=list(tasks),
                limit=limit,
                bootstrap_iters=RESAMPLES,
                log_samples=False,
                task_manager=TaskManager(include_defaults=False),
            )
        except OverflowError:
            raise ContextReadyError(
                "A perplexity is too large for a number: the model predicts these texts very badly, or they have no "
                "spaces between words. Leave that task out."
            ) from None
    return [
        TaskScore(
            task=task,
            metric=metric if filter_name == "none" else f"{metric} ({filter_name})",
            value=float(value),
            stderr=float(error)
            if isinstance(error := values.get(f"{metric}_stderr,{filter_name}"), int | float)
            else None,
            higher_is_better=results["higher_is_better"].get(task, {}).get(metric),
            documents=results["n-samples"].get(task, {}).get("effective"),
        )
        for task, values in results["results"].items()
        for metric, _, filter_name in (key.partition(",") for key in values)
        if filter_name and not metric.endswith("_stderr")
        for value in (values[f"{metric},{filter_name}"],)
        if isinstance(value, int | float)
    ]


def _open(manager: Any, spec: str, shots: int | None) -> list[Any]:
    name, equals, file = spec.partition("=")
    if not equals and spec not in manager.all_tasks:
        raise ContextReadyError(f"Unknown lm_eval task '{spec}'; {_similar(spec, manager.all_tasks)}")
    what = _local_task(name, Path(file)) if equals else spec
    try:
        loaded = manager.load([what])
    except Exception as error:  # lm_eval, datasets and their download backends each raise errors of their own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        advice = "" if equals else "; to score a local file instead, use lambada=FILE, arc_easy=FILE or bits=FILE"
        raise ContextReadyError(f"The task {spec} could not be opened: {reason}{advice}.") from error
    for task in loaded["tasks"].values():
        # As in lm_eval: a task that sets 0 itself has no examples to show.
        if shots is not None and task.get_config("num_fewshot") != 0:
            task.set_config("num_fewshot", shots)
    group = loaded["groups"].get(spec)
    return list(loaded["tasks"].values()) if group is None else [group]


def _similar(name: str, known: Sequence[str]) -> str:
    hint = nearest(name, [*(f"{local}=FILE" for local in _local_names()), *known])
    # Listing thousands of names would not help.
    return hint if hint.startswith("did") else "list them with: lm_eval ls tasks"


def _local_names() -> list[str]:
    return sorted(path.stem for path in TASKS.glob("*.yaml"))


def _local_task(name: str, file: Path) -> dict[str, Any]:
    """The description of a task with the data of a local file included, so that nothing is copied to a disk cache."""
    import yaml  # type: ignore[import-untyped]

    if name not in _local_names():
        raise ContextReadyError(f"The task '{name}' does not take a file; {nearest(name, _local_names())}")
    if not file.is_file():
        raise ContextReadyError(f"There is no file '{file}' for the task {name}; give an existing file as {name}=FILE.")
    rows = _questions(file) if name == "arc_easy" else _texts(file)
    if not rows:
        raise ContextReadyError(f"{file} is empty, so the task {name} has nothing to score.")

    def data(**_: Any) -> dict[str, Any]:
        return {"test": require("datasets", "eval").Dataset.from_list(rows)}

    described: dict[str, Any] = yaml.safe_load((TASKS / f"{name}.yaml").read_text(encoding="utf-8"))
    return described | {"task": f"{name}={file.name}", "custom_dataset": data}


def _texts(file: Path) -> list[dict[str, Any]]:
    return [{"text": text} for text in open_corpus([str(file)]).documents()]


def _questions(file: Path) -> list[dict[str, Any]]:
    expand([str(file)], (".jsonl",))
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ContextReadyError(f"{file}, line {number:,} is not JSON: {error}.") from None
        if not _is_question(row):
            raise ContextReadyError(
                f"{file}, line {number:,} is not an ARC question; it must have question, choices with text and label, "
                "and an answerKey that is one of the labels."
            )
        rows.append(row)
    return rows


def _is_question(row: Any) -> bool:
    try:
        asked, choices = row["question"], row.get("choices")
        if isinstance(asked, dict):
            # The format that AI2 publishes; on the Hub, choices are lists of texts and labels.
            asked, choices = asked["stem"], {key: [one[key] for one in asked["choices"]] for key in ("text", "label")}
        texts, labels = choices["text"], choices["label"]
        return row["answerKey"] in labels and all(isinstance(text, str) and text for text in (asked, *texts))
    except (KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress lm_eval's log messages and prints; in a terminal, its progress bars stay visible."""
    logger, setting = logging.getLogger("lm_eval"), "DISABLE_MULTIPROC"
    level, before = logger.level, os.environ.get(setting)
    aside = sys.stderr if sys.stderr.isatty() else io.StringIO()
    logger.setLevel(logging.ERROR)
    # Resample in this process: forking a process that holds a model and its threads can hang.
    os.environ[setting] = "1"
    try:
        with redirect_stdout(aside), redirect_stderr(aside):
            yield
    finally:
        logger.setLevel(level)
        if before is None:
            del os.environ[setting]
        else:
            os.environ[setting] = before
