"""The runs of the study: shapes, transformers to compare with, ways to train, and what a correction starts from."""

from collections.abc import Sequence
from dataclasses import dataclass

from contextready.train import trials

PAPER = ("gradient=unroll", "passes=2..5", "correction_init=random", "correction_scale=1")
"""Training as in the paper, like the recipe mini-d1-paper."""


@dataclass(frozen=True)
class Shape:
    """The layers and width of a context-ready model, and the steps that it makes."""

    layers: int
    width: int
    wider: int
    """The width with which a transformer of as many layers costs about as much per generated token."""
    steps: int

    @property
    def key(self) -> str:
        """The name in folders."""
        return f"{self.layers}-c{self.width}"

    @property
    def name(self) -> str:
        """The name in tables."""
        return f"D={self.layers} C={self.width}"


SHAPES = (Shape(1, 128, 144, 2000), Shape(1, 256, 304, 1200), Shape(2, 256, 288, 1200), Shape(4, 256, 272, 500))
RECIPE = "recipe: K=1, K=2, then K=2..3"
"""The default of crt train, as a name."""


@dataclass(frozen=True)
class Way:
    """Another way to train than the recipe."""

    name: str
    settings: tuple[str, ...]
    shapes: tuple[Shape, ...] = SHAPES
    steps: tuple[int, ...] | None = None
    """The steps for each shape, if they are not those of the shape."""

    def steps_of(self, shape: Shape) -> int:
        """The steps that a shape makes."""
        return shape.steps if self.steps is None else self.steps[self.shapes.index(shape)]


WAYS = {
    # Shorter, because a step takes up to three times as long.
    "paper": Way("paper's unroll, K=2..5", PAPER, steps=(2000, 600, 600, 250)),
    "k2": Way("K=2 throughout", ("passes=2",)),
    "late": Way("K=2, then K=2..4", ("passes=2@0.8,2..4@0.2",), SHAPES[:3]),
    "k23": Way("K=2..3 throughout", ("passes=2..3",), SHAPES[:1]),
    "first70": Way("K=1 for 70 %, K=2, then K=2..3", ("passes=1@0.7,2@0.2,2..3@0.1",), SHAPES[2:3]),
}
CONTROLS = {
    "n": "one more FFN",
    "w": "wider",
    "p": "nothing added",
}
"""Transformers with as many layers: the first two cost as much per generated token, the last one costs less."""
LONGER = {"n": 1.2, "w": 1.2, "p": 1.3}
"""How many times as many steps they make, so that their curves cover the compute of the context-ready model."""
SCALES = ("1", "0.1", "0.02", "0.005")
GAINS = ("scalar", "channel")
PROBED = ((SHAPES[0], 500), (SHAPES[2], 300), (SHAPES[3], 200))
"""Where the size of the correction is chosen: shapes, and steps of these short runs."""
WEIGHTS = ("0.1", "1")
FIXED_STEPS = 600
"""Steps of the runs with the paper's unroll and a fixed K, which take the longest."""
CONVERSIONS = {
    "continued": ("trained further, no correction", ("correction=none",)),
    "memoryless": ("memoryless control", ("correction=memoryless",)),
    "add": ("add", ("correction=add",)),
    "add-unscaled": ("add, unscaled", ("correction=add", "correction_scale=1")),
    "balanced": ("balanced", ("correction=balanced",)),
    "balanced-unscaled": ("balanced, unscaled", ("correction=balanced", "correction_scale=1")),
}
"""How a pretrained model is trained further."""
CONTINUED_LONGER = 1.25
"""How many times as many steps it makes without a correction, to cover the compute of the others."""
PARTS = ("headline", "compute", "controls", "ways", "scale", "convergence", "conversion")


@dataclass(frozen=True)
class Trial(trials.Trial):
    """A row of the study."""

    shape: Shape | None = None
    """The shape of the models that it belongs to; None for pretrained models."""
    ready: bool = True
    """Whether the model is context-ready."""
    longer: float = 1.0
    """How many times as many steps it makes as the recipe or the user says."""


def trials_of(parts: Sequence[str]) -> list[Trial]:
    """List the trials of these parts, each one once and the most important ones first."""
    found = {trial.key: trial for part in parts for trial in _OF_PART[part]()}
    return list(found.values())


def _ready(key: str, name: str, part: str, shape: Shape, more: Sequence[str] = (), steps: int | None = None) -> Trial:
    settings = (f"layers={shape.layers}", f"width={shape.width}", f"steps={steps or shape.steps}", *more)
    return Trial(key, name, part, "mini-d1", settings, shape=shape)


def _control(kind: str, shape: Shape) -> Trial:
    width = shape.wider if kind == "w" else shape.width
    name = f"N={shape.layers}{' + FFN' if kind == 'n' else ''} C={width}"
    recipe, part = ("mini-n1-ffn", "compute") if kind == "n" else ("mini-n1", "controls")
    settings = (f"layers={shape.layers}", f"width={width}", f"steps={shape.steps}")
    return Trial(f"{kind}{shape.key}", name, part, recipe, settings, shape=shape, ready=False, longer=LONGER[kind])


def _pair(shape: Shape) -> list[Trial]:
    """The recipe, and the transformer that costs exactly as much per generated token."""
    return [_ready(f"d{shape.key}", shape.name, "compute", shape), _control("n", shape)]


def _headline() -> list[Trial]:
    return _pair(SHAPES[0])


def _compute() -> list[Trial]:
    return [trial for shape in SHAPES for trial in _pair(shape)]


def _controls() -> list[Trial]:
    return _compute() + [_control(kind, shape) for shape in SHAPES for kind in ("w", "p")]


def _ways() -> list[Trial]:
    return _compute() + [
        _ready(f"d{shape.key}-{key}", way.name, "ways", shape, way.settings, way.steps_of(shape))
        for key, way in WAYS.items()
        for shape in way.shapes
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
        name = f"paper, K=5, {FIXED_STEPS:,} steps, weight {weight}"
        found.append(_ready(f"d{shape.key}-k5-weight{weight}", name, "convergence", shape, settings, FIXED_STEPS))
    return found


def _conversion() -> list[Trial]:
    # With a cosine, a control that makes more steps would have another learning rate at the same step.
    return [
        Trial(
            f"convert-{key}",
            name,
            "conversion",
            "convert",
            ("schedule=constant", *settings),
            ready=key != "continued",
            longer=CONTINUED_LONGER if key == "continued" else 1.0,
        )
        for key, (name, settings) in CONVERSIONS.items()
    ]


_OF_PART = {
    "headline": _headline,
    "compute": _compute,
    "controls": _controls,
    "ways": _ways,
    "scale": _scale,
    "convergence": _convergence,
    "conversion": _conversion,
}
