"""`crt eval` and `crt plot`: evaluate and draw what is on disk."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from contextready.analysis.curves import AXES, draw, read_curve, short
from contextready.analysis.evaluate import Evaluation, evaluate_checkpoint
from contextready.analysis.perplexity import Score
from contextready.data.shards import Data
from contextready.device import find_device
from contextready.errors import ContextReadyError
from contextready.files import to_json
from contextready.train.checkpoint import Checkpoint, open_trained


def run_eval(
    runs: Sequence[Path],
    *,
    data_folder: Path | None = None,
    best: bool = False,
    passes: str = "1,2,3,5,10",
    block_size: int | None = None,
    tokens: int | None = None,
    sequential: bool = True,
    device: str = "auto",
    as_json: bool = False,
) -> None:
    """Evaluate runs or checkpoints and print them side by side, or as one JSON line."""
    from rich.console import Console
    from rich.progress import Progress

    wanted, where = parse_passes(passes), find_device(device)
    checkpoints = [open_trained(run, best) for run in runs]
    # Everything is opened before anything is computed: a wrong folder is told at once.
    all_data = [data_of(checkpoint, data_folder) for checkpoint in checkpoints]
    console = Console(stderr=True)
    found = []
    for run, checkpoint, data in zip(runs, checkpoints, all_data, strict=True):
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(str(run), total=None)
            found.append(
                evaluate_checkpoint(
                    checkpoint,
                    data,
                    where,
                    block_size,
                    passes=wanted,
                    sequential=sequential,
                    tokens=tokens,
                    advance=lambda done, of, bar=bar, task=task: bar.update(task, total=of, advance=done),
                )
            )
    if as_json:
        records = [
            {"run": str(run), "checkpoint": checkpoint.folder.name, "data": str(data.folder)} | one.as_record()
            for run, checkpoint, data, one in zip(runs, checkpoints, all_data, found, strict=True)
        ]
        print(to_json({"evaluations": records}))
    else:
        print_evaluation([str(run) for run in runs], found)


def parse_passes(text: str) -> list[int]:
    """`1,2,5` as numbers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ContextReadyError(f"--passes {text} is not a list of numbers; write it as 1,2,5.") from None


def data_of(checkpoint: Checkpoint, folder: Path | None) -> Data:
    """Data to evaluate on: what the model was trained on, or other data made with the same tokenizer."""
    checkpoint.must_have_learned_text()
    trained_on = checkpoint.config["train"]["data"]
    if folder is None and not trained_on:
        raise ContextReadyError(f"{checkpoint.folder} does not say what it was trained on; name data with --data.")
    data = Data(folder or Path(trained_on), verify=["val"])
    data.tokenizer()
    if data.tokenizer_sha256 != checkpoint.progress.tokenizer_sha256:
        raise ContextReadyError(
            f"The data {data.folder} was made with another tokenizer than the model {checkpoint.folder}; prepare it "
            f"again with crt data prepare --tokenizer {checkpoint.folder}."
        )
    if data.vocab_size > checkpoint.vocab_size:
        raise ContextReadyError(
            f"The data {data.folder} has {data.vocab_size:,} kinds of tokens and the model "
            f"{checkpoint.folder} knows {checkpoint.vocab_size:,}; evaluate it on its own data."
        )
    return data


def print_evaluation(names: Sequence[str], found: Sequence[Evaluation]) -> None:
    """A column for each model: the paper's depth progression, with standard errors."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE)
    table.add_column("perplexity (bits per byte)", no_wrap=True)
    for name in names:
        table.add_column(Text(name), justify="right", overflow="fold")

    def add(label: str, cells: Sequence[str]) -> None:
        if any(cells):
            table.add_row(label, *cells)

    for k in sorted({k for one in found for k in one.parallel}):
        add(f"parallel K={k}", [_score(one, one.parallel.get(k)) for one in found])
    add("sequential", [_score(one, one.sequential) for one in found])
    add("Corr.: K=1 less K=5", [_gap(one.correction, 2) for one in found])
    add("sequential less largest K", [_gap(one.sequential_gap, 4) for one in found])
    add("L̂, any position", ["" if one.rate is None else f"{one.rate:.2f}" for one in found])
    add("L̂, largest changes", ["" if one.norm_rate is None else f"{one.norm_rate:.2f}" for one in found])
    add("tokens", [f"{one.tokens:,}" for one in found])
    Console(highlight=False).print(table)


def _score(one: Evaluation, score: Score | None) -> str:
    if score is None:
        return ""
    bits = "" if one.bytes_per_token is None else f" ({score.bits_per_byte(one.bytes_per_token)[0]:.4f})"
    return f"{score.perplexity:.2f} ± {score.perplexity_error:.2f}{bits}"


def _gap(gap: tuple[float, float] | None, digits: int) -> str:
    return "" if gap is None else f"{gap[0]:.{digits}f} ± {gap[1]:.{digits}f}"


def run_plot(runs: Sequence[Path], out: Path, axis: str, title: str | None) -> None:
    """Draw and print where the curves cross."""
    names = [run.name for run in runs]
    curves = [read_curve(run, axis, run.name if names.count(run.name) == 1 else str(run)) for run in runs]
    found = draw(curves, out, axis, title)
    for cross in found:
        print(
            f"{cross.below} passes {cross.above} at {short(cross.x)} {AXES[axis]}, perplexity {np.exp(cross.loss):.1f}"
        )
    crossed = {frozenset((cross.below, cross.above)) for cross in found}
    for i, one in enumerate(curves):
        for other in curves[i + 1 :]:
            if frozenset((one.name, other.name)) not in crossed:
                end = min(one.x[-1], other.x[-1])
                below, above = sorted((one, other), key=lambda curve: curve.at(end))
                print(f"{below.name} and {above.name} do not cross; {below.name} ends below")
    print(f"Drawn: {out}")
