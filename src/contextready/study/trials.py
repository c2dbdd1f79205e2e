"""The runs of the study: shapes, ways to train, the size of the correction, the convergence term, and conversion."""

from collections.abc import Sequence
from dataclasses import dataclass

from contextready.train import trials

PAPER = ("gradient=unroll", "passes=2..5", "correction_init=random", "correction_scale=1")
"""Training as in the paper, like the recipe mini-d1-paper."""
FIRST = "1@0.5,2@0.3,2..4@0.2"
"""A transformer for half of the steps. Then its correction, still zero, is trained too."""
WAYS = {
    "paper": ("paper's unroll, K=2..5", PAPER),
    "k2": ("K=2 throughout", ("passes=2",)),
    "k23": ("K=2..3 throughout", ("passes=2..3",)),
    "first": ("transformer first, then converted", (f"passes={FIRST}",)),
}
"""Other ways to train than the recipe: a name and the settings."""
SCALES = ("1", "0.1", "0.02", "0.005")
GAINS = ("scalar", "channel")
WEIGHTS = ("0.1", "1")
CONVERSIONS = {
    "continued": ("trained further, no correction", ("correction=none",)),
    "memoryless": ("memoryless control", ("correction=memoryless",)),
    "add": ("add", ("correction=add",)),
    "add-unscaled": ("add, unscaled", ("correction=add", "correction_scale=1")),
    "balanced": ("balanced", ("correction=balanced",)),
    "balanced-unscaled": ("balanced, unscaled", ("correction=balanced", "correction_scale=1")),
}
"""How a pretrained model is trained further."""


@dataclass(frozen=True)
class Shape:
    """The layers and width of a context-ready model, and the steps that it and its transformer make."""

    layers: int
    width: int
    steps: int

    @property
    def key(self) -> str:
        """The name in folders."""
        return f"{self.layers}-c{self.width}"

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings of both models."""
        return (f"layers={self.layers}", f"width={self.width}")


SHAPES = (Shape(1, 128, 2000), Shape(1, 256, 1200), Shape(2, 256, 1200), Shape(4, 256, 1000))
PROBED = ((SHAPES[0], 500), (SHAPES[2], 300), (SHAPES[3], 300))
"""Where the size of the correction is chosen: shapes, and steps of these short runs."""
PARTS = ("headline", "compute", "ways", "scale", "convergence", "conversion")
LONGER = 1.2
"""The transformer makes more steps, so that its curve covers the compute of the context-ready model."""


@dataclass(frozen=True)
class Trial(trials.Trial):
    """A row of the study."""

    shape: Shape | None = None
    """The shape of the models that it belongs to; None for pretrained models."""
    ready: bool = True
    """Whether the model is context-ready."""


def trials_of(parts: Sequence[str]) -> list[Trial]:
    """List the trials of these parts, each one once and the most important ones first."""
    found = {trial.key: trial for part in parts for trial in _OF_PART[part]()}
    return list(found.values())


def _pair(shape: Shape, part: str = "compute") -> list[Trial]:
    """The recipe and its transformer."""
    longer = round(LONGER * shape.steps)
    return [
        _ready(f"d{shape.key}", f"D={shape.layers} C={shape.width}", part, shape),
        Trial(
            f"n{shape.key}",
            f"N={shape.layers} + FFN C={shape.width}",
            part,
            "mini-n1-ffn",
            (*shape.settings, f"steps={longer}"),
            shape=shape,
            ready=False,
        ),
    ]


def _ready(key: str, name: str, part: str, shape: Shape, more: Sequence[str] = (), steps: int | None = None) -> Trial:
    settings = (*shape.settings, f"steps={steps or shape.steps}", *more)
    return Trial(key, name, part, "mini-d1", settings, shape=shape)


def _headline() -> list[Trial]:
    return _pair(SHAPES[0])


def _compute() -> list[Trial]:
    return [trial for shape in SHAPES for trial in _pair(shape)]


def _ways() -> list[Trial]:
    return _compute() + [
        _ready(f"d{shape.key}-{key}", name, "ways", shape, settings)
        for shape in SHAPES
        for key, (name, settings) in WAYS.items()
    ]


def _scale() -> list[Trial]:
    found = []
    for shape, steps in PROBED:
        sizes = {scale: (f"correction_scale={scale}",) for scale in SCALES}
        sizes |= {gain: (f"correction_gain={gain}",) for gain in GAINS}
        for key, more in sizes.items():
            name = f"learned, one per {key}" if key == "channel" else "learned, one number" if key in GAINS else key
            found.append(_ready(f"scale-d{shape.key}-{key}", name, "scale", shape, (*more, "passes=2"), steps))
    return found


def _convergence() -> list[Trial]:
    shape = SHAPES[0]
    found = [_pair(shape)[0]]
    found += [
        _ready(
            f"d{shape.key}-weight{weight}", f"weight {weight}", "convergence", shape, (f"convergence_weight={weight}",)
        )
        for weight in WEIGHTS
    ]
    for weight in ("0", *WEIGHTS):
        settings = (*PAPER[:1], "passes=5", *PAPER[2:], f"convergence_weight={weight}")
        found.append(
            _ready(f"d{shape.key}-k5-weight{weight}", f"paper, K=5, weight {weight}", "convergence", shape, settings)
        )
    return found


def _conversion() -> list[Trial]:
    return [
        Trial(f"convert-{key}", name, "conversion", "convert", settings, ready=key != "continued")
        for key, (name, settings) in CONVERSIONS.items()
    ]


_OF_PART = {
    "headline": _headline,
    "compute": _compute,
    "ways": _ways,
    "scale": _scale,
    "convergence": _convergence,
    "conversion": _conversion,
}
