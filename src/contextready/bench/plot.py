"""The plot of a benchmark."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contextready.bench.race import Timing
from contextready.plotting import check_picture, pyplot, save_figure


def draw(timings: Sequence[Timing], read: Sequence[dict[str, Any]], bandwidth: float, out: Path) -> None:
    """Plot time per token against context, and prompt time against length, as a PNG, SVG or PDF file."""
    check_picture(out)
    figure, panels = pyplot().subplots(1, 2 if read else 1, figsize=(12 if read else 7.5, 4.8), squeeze=False)
    _draw_decode(panels[0][0], timings)
    panels[0][0].set_title(f"Decoding; memory reads {bandwidth / 1e9:.0f} GB/s", fontsize=10)
    if read:
        _draw_prefill(panels[0][1], read)
        panels[0][1].set_title("Reading a prompt", fontsize=10)
    for panel in panels[0]:
        panel.grid(alpha=0.25)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(frameon=False, fontsize=7)
    figure.tight_layout()
    save_figure(figure, out)


def _draw_decode(axes: Any, timings: Sequence[Timing]) -> None:
    contexts = sorted({t.context for t in timings})
    names = list(dict.fromkeys((t.label, t.engine, t.precision) for t in timings))
    if len(contexts) == 1:
        # With a single context there is no line to draw.
        axes.barh([" ".join(name) for name in names], [1e3 * t.seconds for t in timings])
        axes.invert_yaxis()
        axes.set(xlabel=f"ms per token after {contexts[0]:,}")
        return
    for name in names:
        mine = [t for t in timings if (t.label, t.engine, t.precision) == name]
        axes.plot([t.context for t in mine], [1e3 * t.seconds for t in mine], marker="o", label=" ".join(name))
    axes.set(xlabel="tokens in the context", ylabel="ms per token")
    _ticks(axes, contexts)


def _draw_prefill(axes: Any, read: Sequence[dict[str, Any]]) -> None:
    names = [(one["label"], one["asked"], one["precision"]) for one in read]
    for name in dict.fromkeys(names):
        mine = [one for one, its_name in zip(read, names, strict=True) if its_name == name]
        milliseconds = [1e3 * one["seconds"] for one in mine]
        axes.plot([one["tokens"] for one in mine], milliseconds, marker="o", label=" ".join(name))
    axes.set(xlabel="tokens in the prompt", ylabel="ms")
    _ticks(axes, sorted({one["tokens"] for one in read}))


def _ticks(axes: Any, numbers: Sequence[int]) -> None:
    """Make the x axis logarithmic with a tick at each measured number, and start the y axis at 0."""
    axes.set_xscale("log")
    axes.set_xticks(numbers, [f"{number:,}" for number in numbers])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
