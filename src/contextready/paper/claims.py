"""The claims of the paper that can be checked: each in one sentence, with its figures and where the paper makes it."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from contextready.errors import ContextReadyError, nearest
from contextready.formats.limits import shown
from contextready.formats.record import read_record
from contextready.formats.yaml_file import read_yaml

FILE = Path(__file__).parent / "data" / "claims.yaml"


@dataclass(frozen=True)
class Claim:
    """One claim of the paper."""

    id: str
    """A name that stays the same."""
    claim: str
    """The claim in our words."""
    where: tuple[str, ...]
    """`abstract`, or labels of sections in the paper's source."""
    figures: dict[str, str] = field(default_factory=dict)
    """The figures as printed, each with what it stands for."""
    tables: tuple[str, ...] = ()
    """The tables that it rests on."""
    notes: tuple[str, ...] = ()
    """What qualifies it, mostly from the author's public notebooks."""


@dataclass(frozen=True)
class _File:
    claims: tuple[Claim, ...]

    def __post_init__(self) -> None:
        ids = [claim.id for claim in self.claims]
        for name in ids:
            if ids.count(name) > 1:
                raise ContextReadyError(f"the id '{name}' is used twice.")


@cache
def claims() -> tuple[Claim, ...]:
    """Return all claims in the order of the file."""
    return read_record(_File, read_yaml(FILE), str(FILE)).claims


def claim(id: str) -> Claim:
    """Return one claim by its id."""
    for one in claims():
        if one.id == id:
            return one
    raise ContextReadyError(f"There is no claim '{shown(id)}'; {nearest(id, [one.id for one in claims()])}")
