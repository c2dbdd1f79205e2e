"""How many passes each step makes: the setting `passes`, from a fixed K to a schedule in stages."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import isclose
from typing import Any

from contextready.errors import ContextReadyError
from contextready.formats.limits import shown
from contextready.model.checks import MOST_PASSES

MOST_STAGES = 100
_STAGE = re.compile(r"(\d{1,6})(?:\.\.(\d{1,6}))?(?:@(\d{0,3}(?:\.\d{1,9})?))?", re.ASCII)
_HELP = "write a number (2), a range to draw from (2..4), or stages with fractions of all steps (1@0.5,2..4@0.5)"


@dataclass(frozen=True)
class Stage:
    """A part of the training in which every step draws K from `least` to `most`."""

    least: int
    most: int
    fraction: float
    """The stage's part of all steps."""

    @property
    def depths(self) -> range:
        """Every K that a step may draw."""
        return range(self.least, self.most + 1)


@dataclass(frozen=True)
class PassSchedule:
    """The stages of a training, in order."""

    stages: tuple[Stage, ...]

    @property
    def least(self) -> int:
        """The smallest K of any step."""
        return min(stage.least for stage in self.stages)

    @property
    def most(self) -> int:
        """The largest K of any step."""
        return max(stage.most for stage in self.stages)

    def stage(self, step: int, steps: int) -> Stage:
        """Return the stage of a step, counted from 0, of a training with this many steps."""
        end = 0.0
        for stage in self.stages:
            end += stage.fraction
            # Rounded, because the sum of fractions such as 0.5 + 0.4 + 0.1 is not exactly 1.
            if step < round(end * steps, 6):
                return stage
        return self.stages[-1]


@lru_cache
def parse_passes(text: str) -> PassSchedule:
    """Parse `2`, `2..4`, or stages such as `1@0.5,2@0.4,2..4@0.1`."""
    parts = text.split(",")
    found = [_STAGE.fullmatch(part.strip()) for part in parts[:MOST_STAGES]]
    if len(parts) > MOST_STAGES or not all(found):
        raise ContextReadyError(f"passes={shown(text)} is not a number of passes; {_HELP}.")
    stages = []
    for match in found:
        assert match is not None
        least, most, fraction = match.groups()
        if (fraction is None) != (len(parts) == 1):
            raise ContextReadyError(f"passes={shown(text)} must give a fraction for every stage; {_HELP}.")
        stages.append(Stage(int(least), int(most or least), 1.0 if fraction is None else float(fraction or 0)))
    for stage in stages:
        if not 1 <= stage.least <= stage.most <= MOST_PASSES:
            raise ContextReadyError(
                f"passes={shown(text)} must be from 1 to {MOST_PASSES:,}, with the smaller number first; {_HELP}."
            )
    total = sum(stage.fraction for stage in stages)
    if not isclose(total, 1.0, abs_tol=1e-6) or not all(stage.fraction > 0.0 for stage in stages):
        raise ContextReadyError(
            f"The fractions in passes={shown(text)} must be greater than 0 and add up to 1, but add up to {total:g}."
        )
    return PassSchedule(tuple(stages))


def largest_passes(train: Mapping[str, Any]) -> int | None:
    """Return the largest K in the saved settings of a training, also of older versions; None if it made no passes."""
    passes = train.get("passes")
    return parse_passes(passes).most if isinstance(passes, str) else passes


def joined_passes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with `passes` as text. Older files and commands have two numbers, `min_passes` and `passes`."""
    joined = {key: value for key, value in settings.items() if key != "min_passes"}
    if type(joined.get("passes")) is int:
        joined["passes"] = str(joined["passes"])
    if "min_passes" not in settings:
        return joined
    least, most = settings["min_passes"], joined.get("passes")
    if "passes" not in joined:
        raise ContextReadyError(f"min_passes={shown(least)} needs passes too; write both as one setting, passes=2..5.")
    if str(least).lower() != "none" and str(most).lower() != "none":
        if not isinstance(most, str) or not most.isdecimal():
            raise ContextReadyError(
                f"min_passes={shown(least)} cannot be combined with passes={shown(most)}; write passes=2..5."
            )
        joined["passes"] = f"{least}..{most}" if str(least) != most else most
    return joined
