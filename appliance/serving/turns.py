"""Who may start now: limits on requests at a time, and the lines of those who wait for a limit.

What runs is counted from the engine's own set at the moment of the question, so a count cannot
leak. Callers who wait stand in the line of the limit's subject (`user:5`, `key:9`) in the order in
which they came, and a newcomer stands behind them. All of it runs on the event loop.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from appliance.errors import QuotaExceeded, RateLimited
from appliance.quotas.rules import Limit
from appliance.serving.backend import Backend
from appliance.serving.types import Caller, Queued

T = TypeVar("T")
Told = Callable[[Queued], None]

_clock = time.monotonic
# Those who wait look at least this often, also for what ended without anybody's notice.
_LOOK_EVERY_S = 0.25
# More than this in one line is no line but a flood.
MOST_IN_LINE = 100
# Nobody knows when a running answer ends; a script asks again after this.
_RETRY_AFTER_S = 5


@dataclass(eq=False, slots=True)
class _Place:
    refusal: RateLimited
    wake: "asyncio.Future[None] | None" = None


_lines: dict[str, list[_Place]] = {}


def subjects_of(caller: Caller) -> list[str]:
    user = f"user:{caller.user_id}"
    return [user] if caller.key_id is None else [user, f"key:{caller.key_id}"]


def num_waiting(subject: str) -> int:
    return len(_lines.get(subject, ()))


def turns_changed() -> None:
    """An answer ended: those who wait look again."""
    for line in _lines.values():
        for place in line:
            if place.wake is not None and not place.wake.done():
                place.wake.set_result(None)


async def in_turn(
    caller: Caller,
    attempt: Callable[[], Awaitable[T]],
    *,
    still_wanted: Callable[[], None],
    told: Told | None = None,
) -> T:
    """The outcome of `attempt`, tried again at this caller's turn as long as its limit's rule says.

    Args:
        still_wanted: called while waiting; raises when nobody wants the outcome any more.
        told: gets the place in line, when it changes.

    Raises:
        RateLimited: as `attempt` raised it last.
        What else `attempt` and `still_wanted` raise.
    """
    began_s = _clock()
    refusal = _ahead_in_line(caller)
    while True:
        if refusal is None:
            try:
                return await attempt()
            except RateLimited as exc:
                refusal = exc
        ends_at_s = began_s + refusal.max_wait_s
        if _clock() >= ends_at_s or num_waiting(refusal.subject) >= MOST_IN_LINE:
            raise refusal
        outcome = await _wait_in_line(refusal, attempt, ends_at_s, still_wanted, told)
        if not isinstance(outcome, RateLimited):
            return outcome
        # Another limit stands in the way now.
        refusal = outcome


def _ahead_in_line(caller: Caller) -> RateLimited | None:
    """The refusal of those who wait already for a limit of this caller."""
    for subject in subjects_of(caller):
        if line := _lines.get(subject):
            told = line[-1].refusal
            return RateLimited(
                told.message,
                retry_after_s=told.retry_after_s,
                max_wait_s=told.max_wait_s,
                subject=subject,
            )
    return None


async def _wait_in_line(
    refusal: RateLimited,
    attempt: Callable[[], Awaitable[T]],
    ends_at_s: float,
    still_wanted: Callable[[], None],
    told: Told | None,
) -> T | RateLimited:
    line = _lines.setdefault(refusal.subject, [])
    place = _Place(refusal)
    line.append(place)
    said: int | None = None
    try:
        while True:
            still_wanted()
            ahead = line.index(place)
            if told is not None and ahead != said:
                said = ahead
                told(Queued(ahead, None))
            if ahead == 0:
                try:
                    return await attempt()
                except RateLimited as exc:
                    place.refusal = exc
                    if exc.subject != refusal.subject:
                        return exc
            left_s = ends_at_s - _clock()
            if left_s <= 0:
                raise _in_vain(place.refusal)
            await _sleep(place, min(left_s, _LOOK_EVERY_S))
    finally:
        line.remove(place)
        if not line:
            _lines.pop(refusal.subject, None)
        turns_changed()


async def _sleep(place: _Place, timeout_s: float) -> None:
    place.wake = asyncio.get_running_loop().create_future()
    await asyncio.wait([place.wake], timeout=timeout_s)
    place.wake = None


def _in_vain(refusal: RateLimited) -> RateLimited:
    return RateLimited(
        f"{refusal.message} It waited {refusal.max_wait_s:.0f} s for its turn.",
        retry_after_s=refusal.retry_after_s,
        subject=refusal.subject,
    )


# ---- limits on what runs at a time


def turn_check(caller: Caller, limits: Sequence[Limit], backend: Backend) -> None:
    """Refuse a request whose caller has as many in the engine as a limit allows.

    No await may lie between this and the moment at which the engine takes the request.

    Raises:
        RateLimited: with the rule's words; QuotaExceeded when the limit allows none at all.
    """
    live: tuple[int, int] | None = None
    for limit in limits:
        most = most_at_once(limit, backend)
        if most is None:
            continue
        live = live or _live_of(caller, backend)
        running = live[limit.of_key]
        if most == 0:
            raise QuotaExceeded(f"The limit of {limit.words} allows no request at all.")
        if running >= most:
            share = f", {most} now" if limit.name == "slot_share" else ""
            raise RateLimited(
                f"The limit of {limit.words}{share} is reached: {running:,} run or wait. "
                "Try again when one of them has ended.",
                retry_after_s=_RETRY_AFTER_S,
                max_wait_s=limit.wait_s,
                subject=subjects_of(caller)[limit.of_key],
            )


def most_at_once(limit: Limit, backend: Backend) -> int | None:
    """Requests at a time that `limit` allows; None for a limit on something else."""
    if limit.name == "concurrent_requests":
        return limit.value
    if limit.name == "slot_share":
        slots = (backend.state().get("slots") or {}).get("effective", 1)
        return max(1, slots * limit.value // 100)
    return None


def _live_of(caller: Caller, backend: Backend) -> tuple[int, int]:
    """Requests in the engine: of the user, and of the key."""
    user_id, key_id = str(caller.user_id), str(caller.key_id)
    labels = backend.live_labels()
    return (
        sum(each.get("user_id") == user_id for each in labels),
        sum(each.get("key_id") == key_id for each in labels),
    )


def live_by_user(backend: Backend) -> Counter[str]:
    """User id, as text, -> requests in the engine."""
    return Counter(each.get("user_id", "") for each in backend.live_labels())
