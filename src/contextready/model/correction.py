"""The corrections: functions of the previous position's output that are added to a token's embedding.

Each correction is one class. Its formula is written once, in terms of abstract operations. Four modules implement
them: torch (`model/correction_module.py`), the hand-written gradient (`solve/bptt.py`), the exported graph
(`infer/ggml/formula.py`) and the cost accounting below. So a new correction needs only a class here and a test. This
file does not import torch, because exported models run without it.
"""

from functools import cached_property
from typing import Any, ClassVar, Protocol

from contextready.errors import ContextReadyError, nearest


class Operations(Protocol):
    """The operations that formulas use. Each implementation has its own type of values, which support `+`."""

    def LN(self, x: Any, name: str = "norm") -> Any:
        """Apply a layer norm of the correction, whose weights are saved under this name."""

    def corr_ffn(self, x: Any) -> Any:
        """Apply the correction's own network: linear to 4C, GELU, linear back to C, times its scale."""

    def last_ffn(self, x: Any) -> Any:
        """Apply the feed-forward network of the last block."""

    def last_norm(self, x: Any) -> Any:
        """Apply the norm in front of that network."""

    def concat(self, z: Any, e: Any) -> Any:
        """Concatenate both values."""


class Correction:
    """A correction: a function of z_{t-1} and e_t, the same at every position."""

    name: ClassVar[str | None] = None
    """Its name in settings and files; a class without a name is not registered."""
    formula: ClassVar[str] = "none"
    """The formula as text, for model cards and help."""
    carries_residual: ClassVar[bool] = False
    """Whether a position passes z - x (what the blocks added) to the next one, instead of z."""

    def __init_subclass__(cls, name: str | None = None) -> None:
        cls.name = name
        if name is not None:
            CORRECTIONS[name] = cls()

    def __call__(self, ops: Operations, z: Any, e: Any) -> Any:
        """Compute correction_t from the vector carried over from position t-1 and e_t; None adds nothing."""
        raise NotImplementedError

    @cached_property
    def parts(self) -> "Parts":
        """The weights that the formula uses and its cost, found by evaluating it on widths."""
        parts = Parts()
        self(parts, Width(1), Width(1))
        return parts


CORRECTIONS: dict[str, Correction] = {}
"""All corrections by name."""


class Add(Correction, name="add"):
    """The paper's main correction."""

    formula = "corr_ffn(LN(z_{t-1} + e_t))"

    def __call__(self, ops: Operations, z: Any, e: Any) -> Any:
        """Compute correction_t from z_{t-1} and e_t."""
        return ops.corr_ffn(ops.LN(z + e))


class Balanced(Correction, name="balanced"):
    """Separate norms for z and e, because in pretrained models z can be hundreds of times larger than e."""

    formula = "corr_ffn(LN_z(z_{t-1}) + LN_e(e_t))"

    def __call__(self, ops: Operations, z: Any, e: Any) -> Any:
        """Compute correction_t from z_{t-1} and e_t, each with its own norm."""
        return ops.corr_ffn(ops.LN(z, "norm_z") + ops.LN(e, "norm_e"))


class Concat(Correction, name="concat"):
    """Concatenates z and e instead of adding them."""

    formula = "corr_ffn(LN([z_{t-1}; e_t]))"

    def __call__(self, ops: Operations, z: Any, e: Any) -> Any:
        """Compute correction_t from z_{t-1} and e_t."""
        return ops.corr_ffn(ops.LN(ops.concat(z, e)))


class ConcatZ(Correction, name="concat_z"):
    """Concatenates z and e, and normalises z alone: an earlier form, with which the paper's tables were made."""

    formula = "corr_ffn([LN(z_{t-1}); e_t])"

    def __call__(self, ops: Operations, z: Any, e: Any) -> Any:
        """Compute correction_t from z_{t-1} and e_t."""
        return ops.corr_ffn(ops.concat(ops.LN(z), e))


class Blind(Correction, name="blind"):
    """Does not see the current token."""

    formula = "corr_ffn(LN(z_{t-1}))"

    def __call__(self, ops: Operations, z: Any, e: Any) -> Any:
        """Compute correction_t from z_{t-1} alone."""
        return ops.corr_ffn(ops.LN(z))


class Memoryless(Correction, name="memoryless"):
    """A control: a network of the same size that does not see the past."""

    formula = "corr_ffn(LN(e_t))"

    def __call__(self, ops: Operations, z: Any, e: Any) -> Any:
        """Compute correction_t from e_t alone."""
        return ops.corr_ffn(ops.LN(e))


class BlockHead(Correction, name="block_head"):
    """An ablation without a network: adds what the blocks added at the previous position."""

    formula = "z_{t-1} - x_{t-1}"
    carries_residual = True

    def __call__(self, ops: Operations, z: Any, e: Any) -> Any:
        """Return the vector carried over from position t-1."""
        return z


class Tied(Correction, name="tied"):
    """An ablation that reuses the weights of the last block's FFN."""

    formula = "FFN_D(LN(z_{t-1} + e_t))"

    def __call__(self, ops: Operations, z: Any, e: Any) -> Any:
        """Compute correction_t from z_{t-1} and e_t."""
        return ops.last_ffn(ops.LN(z + e))


class TiedNorm(Correction, name="tied_norm"):
    """An ablation that reuses the weights of the last block's FFN and of the norm in front of it."""

    formula = "FFN_D(LN_D(z_{t-1} + e_t))"

    def __call__(self, ops: Operations, z: Any, e: Any) -> Any:
        """Compute correction_t from z_{t-1} and e_t."""
        return ops.last_ffn(ops.last_norm(z + e))


class NoCorrection(Correction):
    """Makes a context-ready model a plain transformer."""

    def __call__(self, ops: Operations, z: Any, e: Any) -> Any:
        """Return None: nothing is added."""
        return None


NO_CORRECTION = NoCorrection()
INITS = ("random", "zero")
GAINS = ("scalar", "channel")
LARGEST_SCALE = 1e6


def find_correction(name: str | None) -> Correction:
    """Return the correction of this name; None means no correction."""
    if name is None:
        return NO_CORRECTION
    if name not in CORRECTIONS:
        raise ContextReadyError(f"Unknown correction '{name}'; {nearest(name, list(CORRECTIONS))}")
    return CORRECTIONS[name]


def check_correction(name: str | None, init: str, scale: float = 1.0, gain: str | None = None) -> None:
    """Raise an error for an unknown correction, an unknown setting of one, or two that cannot be combined."""
    has_network = name is None or find_correction(name).parts.has_network
    if init not in INITS:
        raise ContextReadyError(f"Unknown correction_init '{init}'; {nearest(init, INITS)}")
    if init == "zero" and not has_network:
        raise ContextReadyError(
            f"correction={name} has no output layer that could start at zero; use correction_init=random."
        )
    if not 0.0 < scale <= LARGEST_SCALE:
        raise ContextReadyError(
            f"correction_scale must be greater than 0 and at most {LARGEST_SCALE:g}, but got {scale:g}."
        )
    if gain is not None and gain not in GAINS:
        raise ContextReadyError(f"Unknown correction_gain '{gain}'; {nearest(gain, GAINS)}")
    if (scale != 1.0 or gain is not None) and not has_network:
        raise ContextReadyError(
            f"correction={name} has no network of its own whose output could be scaled; leave correction_scale and "
            "correction_gain out."
        )


def gain_size(gain: str | None, width: int) -> int:
    """Return the number of learned factors."""
    return {None: 0, "scalar": 1, "channel": width}[gain]


def describe_corrections(with_network: bool = False) -> str:
    """Format a help text with the name and formula of all corrections, or of those with a network of their own."""
    listed = {name: c for name, c in CORRECTIONS.items() if c.parts.has_network or not with_network}
    return "\n".join(f"  {name:<18}{correction.formula}" for name, correction in listed.items())


class Width:
    """The size of a value in units of C."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __add__(self, other: "Width") -> "Width":
        if self.size != other.size:
            raise ValueError(f"A formula adds values of different sizes, {self.size} C and {other.size} C.")
        return self


class Parts:
    """Operations on widths. They record a formula's norms, whether it has a network, and its cost."""

    def __init__(self) -> None:
        self.norms: dict[str, int] = {}
        """The size of each norm, in units of C."""
        self.network_inputs = 0
        """The input size of corr_ffn in units of C; 0 if the formula does not use it."""
        self.uses_last_block = False
        self.network_macs = 0
        """Multiply-accumulates of the network per token, in units of C²."""
        self.last_ffns = 0
        """How often the last block's network is used."""

    @property
    def has_network(self) -> bool:
        """Whether the correction has its own output layer, which can start at zero."""
        return self.network_inputs > 0

    @property
    def macs_per_width_squared(self) -> int:
        """Multiply-accumulates per token in units of C², if the last block has the paper's network."""
        return self.network_macs + 8 * self.last_ffns

    def macs(self, width: int, last_ffn: int | None = None) -> int:
        """Multiply-accumulates per token; `last_ffn` are those of the last block's network (none: the paper's)."""
        return self.network_macs * width**2 + self.last_ffns * (8 * width**2 if last_ffn is None else last_ffn)

    def LN(self, x: Width, name: str = "norm") -> Width:
        """Record a norm."""
        self.norms[name] = x.size
        return x

    def corr_ffn(self, x: Width) -> Width:
        """Record the network."""
        self.network_inputs = x.size
        self.network_macs += 4 * x.size + 4
        return Width(1)

    def last_ffn(self, x: Width) -> Width:
        """Record that the last block's network is used."""
        self.uses_last_block = True
        self.last_ffns += 1
        return x

    def last_norm(self, x: Width) -> Width:
        """Record that the last block's norm is used."""
        self.uses_last_block = True
        return x

    def concat(self, z: Width, e: Width) -> Width:
        """Return the sum of both sizes."""
        return Width(z.size + e.size)
