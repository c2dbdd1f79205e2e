"""How a prompt was read. Needs nothing but Python, so that exported models report alike."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReadInfo:
    """How a prompt was read: what it cost, and how far from exact the result is."""

    solver: str
    """What did the work: sequential, jacobi or sweep."""
    tokens: int
    seconds: float
    passes: float
    """Passes through the blocks that a token made, on average: 1 for sequential."""
    macs: int | None
    """Multiply-accumulates spent, or none where a model's are not known."""
    plain_macs: int | None
    """What one plain pass of the blocks over the same tokens, without any correction, spends."""
    changes: tuple[float, ...]
    """The largest change of a position's z by each pass or sweep after the first, relative to the largest ‖z‖."""
    exact: bool
    """Whether the result is the stream's, to rounding."""
    note: str = ""
    """What was done otherwise than asked, and why."""

    @property
    def certificate(self) -> float:
        """The last change, relative to the largest ‖z‖: 0 where exact."""
        return 0.0 if self.exact else self.changes[-1] if self.changes else float("inf")

    @property
    def cost(self) -> float | None:
        """The arithmetic in units of one plain pass."""
        return None if self.macs is None or not self.plain_macs else self.macs / self.plain_macs
