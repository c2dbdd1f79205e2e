"""The corrections: what the previous position tells a token before it enters the blocks. Each is one class.

A formula is written once, over operations that others bring: torch (`model/correction_module.py`), the hand-written
gradient (`solve/bptt.py`), the graph of an exported model (`infer/ggml/graph.py`) and the accounting below. So a new
correction is one class here and its test. Nothing here needs torch, because an exported model runs without it.
"""

from functools import cached_property
from typing import Any, ClassVar, Protocol

from contextready.errors import ContextReadyError, nearest


class Operations(Protocol):
    """What formulas are made of. Values are what an implementation computes with; `+` adds them."""

    def LN(self, x: Any, name: str = "norm") -> Any:
        """A layer norm of the correction's own, saved under this name."""

    def corr_ffn(self, x: Any) -> Any:
        """The correction's own network: linear to 4C, GELU, linear back to C."""

    def last_ffn(self, x: Any) -> Any:
        """The feed-forward network of the last block."""

    def concat(self, z: Any, e: Any) -> Any:
        """Both, side by side."""


class Correction:
    """A correction: a function of z_{t-1} and e_t, the same at every position."""

    name: ClassVar[str | None] = None
    """What settings and files call it; a class without a name is not registered."""
    formula: ClassVar[str] = "none"
    """For people: model cards and help."""
    carries_residual: ClassVar[bool] = False
    """What a position leaves for the next one: z - x, what the blocks added, instead of z."""

    def __init_subclass__(cls, name: str | None = None) -> None:
        cls.name = name
        if name is not None:
            CORRECTIONS[name] = cls()

    def __call__(self, ops: Operations, z: Any, e: Any) -> Any:
        """correction_t from what position t-1 left and e_t; none where nothing is added."""
        raise NotImplementedError

    @cached_property
    def parts(self) -> "Parts":
        """The weights of the formula and its cost, found by evaluating it on widths."""
        parts = Parts()
        self(parts, Width(1), Width(1))
        return parts


CORRECTIONS: dict[str, Correction] = {}
"""Every correction by name."""


class Add(Correction, name="add"):
    """The paper's main form."""

    formula = "corr_ffn(LN(z_{t-1} + e_t))"

    def __call__(self, ops: Operations, z: Any, e: Any) -> Any:
        """correction_t from z_{t-1} and e_t."""
        return ops.corr_ffn(ops.LN(z + e))


class Balanced(Correction, name="balanced"):
    """Two norms, so that neither drowns the other: in pretrained models z is up to hundreds of times as large as e."""

    formula = "corr_ffn(LN_z(z_{t-1}) + LN_e(e_t))"

    def __call__(self, ops: Operations, z: Any, e: Any) -> Any:
        """correction_t from z_{t-1} and e_t, each by its own norm."""
        return ops.corr_ffn(ops.LN(z, "norm_z") + ops.LN(e, "norm_e"))


class Concat(Correction, name="concat"):
    """Both, side by side."""

    formula = "corr_ffn(LN([z_{t-1}; e_t]))"

    def __call__(self, ops: Operations, z: Any, e: Any) -> Any:
        """correction_t from z_{t-1} and e_t."""
        return ops.corr_ffn(ops.LN(ops.concat(z, e)))


class Blind(Correction, name="blind"):
    """The token itself is not seen."""

    formula = "corr_ffn(LN(z_{t-1}))"

    def __call__(self, ops: Operations, z: Any, e: Any) -> Any:
        """correction_t from z_{t-1} alone."""
        return ops.corr_ffn(ops.LN(z))


class Memoryless(Correction, name="memoryless"):
    """A control: an equally large network that does not see the past."""

    formula = "corr_ffn(LN(e_t))"

    def __call__(self, ops: Operations, z: Any, e: Any) -> Any:
        """correction_t from e_t alone."""
        return ops.corr_ffn(ops.LN(e))


class BlockHead(Correction, name="block_head"):
    """An ablation: no network, only what the blocks added to their input."""

    formula = "z_{t-1} - x_{t-1}"
    carries_residual = True

    def __call__(self, ops: Operations, z: Any, e: Any) -> Any:
        """correction_t is what position t-1 left."""
        return z


class Tied(Correction, name="tied"):
    """An ablation: the weights of the last block's own FFN."""

    formula = "FFN_D(LN(z_{t-1} + e_t))"

    def __call__(self, ops: Operations, z: Any, e: Any) -> Any:
        """correction_t from z_{t-1} and e_t."""
        return ops.last_ffn(ops.LN(z + e))


class NoCorrection(Correction):
    """A plain transformer, wherever a context-ready model is expected."""

    def __call__(self, ops: Operations, z: Any, e: Any) -> Any:
        """Nothing is added."""
        return None


NO_CORRECTION = NoCorrection()
INITS = ("random", "zero")


def find_correction(name: str | None) -> Correction:
    """The correction of this name; none: no correction."""
    if name is None:
        return NO_CORRECTION
    if name not in CORRECTIONS:
        raise ContextReadyError(f"Unknown correction '{name}'; {nearest(name, list(CORRECTIONS))}")
    return CORRECTIONS[name]


def check_correction(name: str | None, init: str) -> None:
    """Refuse an unknown correction, an unknown initialisation, or a pair that makes no sense."""
    correction = find_correction(name)
    if init not in INITS:
        raise ContextReadyError(f"Unknown correction_init '{init}'; {nearest(init, INITS)}")
    if name is not None and init == "zero" and not correction.parts.has_network:
        raise ContextReadyError(
            f"correction={name} has no output layer of its own to start at zero; use correction_init=random."
        )


def describe_corrections(with_network: bool = False) -> str:
    """Help text: every correction and its formula, or only those whose own network can start at zero."""
    listed = {name: c for name, c in CORRECTIONS.items() if c.parts.has_network or not with_network}
    return "\n".join(f"  {name:<18}{correction.formula}" for name, correction in listed.items())


class Width:
    """The size of a value in units of C."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __add__(self, other: "Width") -> "Width":
        if self.size != other.size:
            raise ValueError(f"A formula adds values of {self.size} C and {other.size} C.")
        return self


class Parts:
    """The operations on widths: which norms a formula has, whether it has a network, and what it costs."""

    def __init__(self) -> None:
        self.norms: dict[str, int] = {}
        """Their sizes by name, in units of C."""
        self.network_inputs = 0
        """Inputs of corr_ffn in units of C; 0 where the formula has none."""
        self.uses_last_ffn = False
        self.macs_per_width_squared = 0
        """Multiply-accumulates per token, in units of C²."""

    @property
    def has_network(self) -> bool:
        """Whether there is an output layer of its own, which can start at zero."""
        return self.network_inputs > 0

    def LN(self, x: Width, name: str = "norm") -> Width:
        """Note a norm."""
        self.norms[name] = x.size
        return x

    def corr_ffn(self, x: Width) -> Width:
        """Note the network."""
        self.network_inputs = x.size
        self.macs_per_width_squared += 4 * x.size + 4
        return Width(1)

    def last_ffn(self, x: Width) -> Width:
        """Note that the last block's network is used."""
        self.uses_last_ffn = True
        self.macs_per_width_squared += 8
        return x

    def concat(self, z: Width, e: Width) -> Width:
        """Both sizes together."""
        return Width(z.size + e.size)
