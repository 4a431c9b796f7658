"""What a capacity test is to measure, checked."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from appliance.capacity.recommend import Limits
from appliance.errors import BadRequest

MAX_USERS = 512
MAX_LEVELS = 12
MIN_LEVEL_S, MAX_LEVEL_S = 1.0, 600.0
# A level sends at most this many requests for each of its users.
MAX_REQUESTS_PER_USER = 200
DEFAULT_LEVELS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    mix: str = "chat"
    levels: Sequence[int] = DEFAULT_LEVELS
    level_s: float = 30.0
    limits: Limits = field(default_factory=Limits)
    # Not above the first level that is not good, and one level more just below it.
    stops_at_limit: bool = True
    is_low_priority: bool = True
    # Let as many answers run at once as a level has users, and take that back at the end.
    raises_slots: bool = True
    # Hold while members wait, and end when one waits longer than this; None is no guard.
    guard_s: float | None = 5.0

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> "Plan":
        return cls(**{**found, "limits": Limits(**found["limits"])})

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "levels": list(self.levels)}


def parse_levels(text: str) -> tuple[int, ...]:
    """`1,2,4` in rising order, each once. Raises BadRequest."""
    parts = [part for part in re.split(r"[,\s]+", text.strip()) if part]
    bad = next((p for p in parts if not re.fullmatch(r"[1-9][0-9]{0,2}", p)), None)
    if bad is not None or not parts:
        raise BadRequest(
            f"Levels are whole numbers from 1 to {MAX_USERS} with commas, like 1,2,4,8; "
            f"got {(bad or text)[:40]!r}.",
            param="levels",
        )
    levels = tuple(sorted({int(part) for part in parts}))
    if levels[-1] > MAX_USERS:
        raise BadRequest(
            f"{levels[-1]} at the same time is too many; at most {MAX_USERS} are allowed.",
            param="levels",
        )
    if len(levels) > MAX_LEVELS:
        raise BadRequest(
            f"{len(levels)} levels are too many; at most {MAX_LEVELS} are allowed.", param="levels"
        )
    return levels
