"""The rows of an experiment: runs with the same settings and several seeds, each in its own folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contextready.errors import ContextReadyError
from contextready.files import read_json
from contextready.runs.config import RunConfig
from contextready.settings import parse_assignments


@dataclass(frozen=True)
class Trial:
    """A row of a table: a model and its training settings, to be run with several seeds."""

    key: str
    """The name of its folder, without the seed."""
    name: str
    part: str
    recipe: str
    settings: tuple[str, ...]

    def words(self, seed: int, out: Path) -> tuple[str, ...]:
        """The arguments of the command that trains it."""
        return (self.recipe, *self.settings, f"seed={seed}", f"out={self.folder(seed, out)}")

    def folder(self, seed: int, out: Path) -> Path:
        """The folder of this trial's run with the given seed."""
        return out / f"{self.key}-seed{seed}"

    def seeds(self, out: Path) -> list[int]:
        """The seeds for which such a folder exists."""
        ends = (path.name.removeprefix(f"{self.key}-seed") for path in out.glob(f"{self.key}-seed*"))
        return sorted(int(end) for end in ends if end.isdecimal())


def with_changes(words: Sequence[str], changes: Sequence[str]) -> tuple[str, ...]:
    """Replace a trial's settings by the user's settings of the same key."""
    changed = set(parse_assignments(changes))
    return (*(word for word in words if word.partition("=")[0] not in changed), *changes)


def settings_of(run: Path) -> RunConfig:
    """Read the settings of a run from its folder."""
    saved = read_json(run / "config.json")
    try:
        return RunConfig.from_dict(saved)
    except (KeyError, TypeError, AttributeError):
        raise ContextReadyError(f"{run / 'config.json'} is damaged: it does not hold a run's settings.") from None


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table whose columns are also aligned as plain text."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rows = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([rows[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *rows[1:]])
