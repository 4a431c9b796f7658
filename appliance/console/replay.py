"""What other slots would have meant for the last minutes' real requests: a calculation.

Requests arrive when they did and take as long as they did; only the number of slots differs. That
answers "who would have waited", not how much slower each answer gets when more run together.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from appliance.console.request_log import PREEMPTED, QUEUED, Row


@dataclass(frozen=True, slots=True)
class Past:
    """One request of the past: when it came, and for how long it was computed."""

    came: float
    took: float
    is_interactive: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    requests: int
    # Waited longer than half a second, which people notice.
    waited: int
    longest_s: float
    p95_s: float


WAITED_S = 0.5
# More of the newest requests than these would tell nothing new.
MAX_REQUESTS = 2000


def past_requests(rows: Iterable[Row], now: float) -> list[Past]:
    """Requests that were started, in the order of their arrival."""
    found = []
    for row in rows:
        segments = row.get("segments") or []
        parts = [segments[at : at + 3] for at in range(0, len(segments), 3)]
        ends = [part[2] for part in parts[1:]] + [row.ended if row.ended is not None else now]
        took = sum(
            max(0.0, end - part[2])
            for part, end in zip(parts, ends, strict=True)
            if part[0] not in (QUEUED, PREEMPTED)
        )
        if took:
            found.append(Past(float(row.get("since")), took, row.get("class") == "interactive"))
    return sorted(found, key=lambda past: past.came)[-MAX_REQUESTS:]


def replay(requests: list[Past], slots: int, reserved: int) -> Outcome:
    """First come, first served; the last `reserved` free slots only for interactive requests."""
    ends: list[float] = []
    waiting: list[Past] = []
    waits: list[float] = []
    left = list(reversed(requests))
    reserved = min(reserved, slots - 1)

    def start_all(now: float) -> None:
        while True:
            free = slots - len(ends)
            chosen = next((p for p in waiting if p.is_interactive or free > reserved), None)
            if chosen is None or not free:
                return
            waiting.remove(chosen)
            waits.append(now - chosen.came)
            heapq.heappush(ends, now + chosen.took)

    while left or waiting:
        if ends and (not left or ends[0] <= left[-1].came):
            now = heapq.heappop(ends)
        else:
            arrived = left.pop()
            now = arrived.came
            waiting.append(arrived)
        start_all(now)
    waits.sort()
    return Outcome(
        requests=len(waits),
        waited=sum(wait > WAITED_S for wait in waits),
        longest_s=round(waits[-1], 2) if waits else 0.0,
        p95_s=round(waits[int(0.95 * (len(waits) - 1))], 2) if waits else 0.0,
    )
