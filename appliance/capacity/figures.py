"""From the answers of one level to its figures. Plain data: stored, exported and compared."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from appliance.capacity.load import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """What N users at the same time got. Seconds; None where nothing was measured."""

    users: int
    requests: int
    errors: int
    measured_s: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    itl_p50_s: float | None
    itl_p95_s: float | None
    # Answer tokens of all users together, and of one, while answers are written.
    tokens_per_s: float
    user_tokens_per_s: float
    prompt_tokens: int
    completion_tokens: int
    first_error: str = ""
    # Added between two levels, where the limit was crossed.
    is_added: bool = False
    # Known of this appliance's own server only.
    queue_p50_s: float | None = None
    queue_p95_s: float | None = None
    slots: int | None = None
    kv_share: float | None = None
    memory_bytes: int | None = None
    preemptions: int | None = None
    # Seconds in which the test waited for members; not counted.
    held_s: float = 0.0

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> "Level":
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in found.items() if name in names})

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def level_of(load: Load, measured_s: float, **known: Any) -> Level:
    good = [answer for answer in load.answers if not answer.error]
    bad = [answer for answer in load.answers if answer.error]
    ttfts = [ttft for answer in good if (ttft := answer.ttft_s) is not None]
    gaps = [gap for answer in good for gap in answer.gaps_s]
    # Tokens of an answer that failed half-way were computed too, but nobody can use them.
    tokens = sum(answer.tokens_until(measured_s) for answer in good)
    speed = tokens / measured_s
    return Level(
        users=load.users,
        requests=len(load.answers),
        errors=len(bad),
        measured_s=round(measured_s, 3),
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p95_s=percentile(ttfts, 0.95),
        itl_p50_s=percentile(gaps, 0.5),
        itl_p95_s=percentile(gaps, 0.95),
        tokens_per_s=speed,
        user_tokens_per_s=speed / load.users,
        prompt_tokens=sum(answer.prompt_tokens for answer in good),
        completion_tokens=round(sum(answer.tokens_until(float("inf")) for answer in good)),
        first_error=bad[0].error if bad else "",
        held_s=round(load.held_s, 3),
        **known,
    )
