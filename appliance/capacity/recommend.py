"""From measured levels to one number of slots, and why not more. Pure.

The knee is where tokens a second squared over users is highest: throughput over response time
(Kleinrock's "power"), with the response time of a closed loop by Little's law.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from appliance.capacity.figures import Level


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is still good; None is no limit."""

    ttft_p95_s: float | None = 2.0
    itl_p95_s: float | None = 0.1
    user_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    # The most users at the same time with every level up to it good; None when none is.
    users: int | None
    # The knee of all levels; None without levels.
    knee: int | None
    # The first level that is not good, and each reason in words; None when all are good.
    fails_at: int | None
    reasons: tuple[str, ...]
    title: str
    text: str


def faults(level: Level, limits: Limits) -> dict[str, str]:
    """Which figures of the level are not good: field name -> reason in words."""
    found = {}
    if level.errors:
        found["errors"] = (
            f"{level.errors} of {level.requests} requests failed ({level.first_error})"
        )
    ttft, itl = level.ttft_p95_s, level.itl_p95_s
    if limits.ttft_p95_s is not None and (ttft is None or ttft > limits.ttft_p95_s):
        took = "never comes" if ttft is None else f"takes {seconds(ttft)}"
        found["ttft_p95_s"] = f"the first token {took} (limit {seconds(limits.ttft_p95_s)})"
    if limits.itl_p95_s is not None and itl is not None and itl > limits.itl_p95_s:
        found["itl_p95_s"] = (
            f"the next token takes {milliseconds(itl)} (limit {milliseconds(limits.itl_p95_s)})"
        )
    least = limits.user_tokens_per_s
    if least is not None and level.user_tokens_per_s < least:
        found["user_tokens_per_s"] = (
            f"each user gets {number(level.user_tokens_per_s)} tok/s (limit {number(least)})"
        )
    return found


def advise(levels: Sequence[Level], limits: Limits, *, slots_now: int | None = None) -> Advice:
    """The highest N where the limits hold. A level above one that fails is not trusted."""
    ordered = sorted(levels, key=lambda level: level.users)
    best, failing = None, None
    for level in ordered:
        if faults(level, limits):
            failing = level
            break
        best = level
    reasons = () if failing is None else tuple(faults(failing, limits).values())
    title, text = _words(best, failing, reasons, slots_now)
    return Advice(
        users=None if best is None else best.users,
        knee=knee(ordered),
        fails_at=None if failing is None else failing.users,
        reasons=reasons,
        title=title,
        text=text,
    )


def knee(levels: Sequence[Level]) -> int | None:
    """The N after which more users add more waiting than work."""
    measured = [level for level in levels if level.tokens_per_s > 0]
    if not measured:
        return None
    return max(measured, key=lambda level: level.tokens_per_s**2 / level.users).users


def finer_level(levels: Sequence[Level], limits: Limits) -> int | None:
    """An N worth measuring between the last good level and the first that fails, if one is."""
    advice = advise(levels, limits)
    if advice.users is None or advice.fails_at is None:
        return None
    middle = (advice.users + advice.fails_at) // 2
    return middle if middle > advice.users else None


def _words(
    best: Level | None, failing: Level | None, reasons: Sequence[str], slots_now: int | None
) -> tuple[str, str]:
    if best is None and failing is None:
        return "Nothing was measured", "The test ended before its first level."
    if best is None:
        assert failing is not None, "one of the two is set here"
        return (
            f"Too slow even at {failing.users}",
            f"At {failing.users} at the same time {' and '.join(reasons)}. Allow more time, use "
            "a smaller model, or a faster machine.",
        )
    title = f"Set slots to {best.users}"
    if slots_now == best.users:
        title = f"Keep {best.users} {'slot' if best.users == 1 else 'slots'}"
    if failing is None and (slots_now is None or slots_now > best.users):
        # Nothing speaks against what runs now.
        title = f"Good up to {best.users}"
    speed = f"{number(best.tokens_per_s)} tok/s in all"
    if failing is None:
        text = f"Every answer was good: {speed}."
        text += f" No limit was reached: test with more than {best.users} to find it."
    else:
        text = f"The most this server can do with every answer still good: {speed}."
        text += f" At {failing.users} {' and '.join(reasons)}{_gain(best, failing)}."
    if slots_now is not None and slots_now != best.users:
        text += f" You run {slots_now} now."
    return title, text


def _gain(best: Level, failing: Level) -> str:
    if best.tokens_per_s <= 0:
        return ""
    gain = round(100 * (failing.tokens_per_s / best.tokens_per_s - 1))
    return f", for {gain} % more speed" if gain >= 1 else ", for no more speed"


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value < 0.1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 1 else f"{value:.1f} s"


def milliseconds(value: float | None) -> str:
    """For times between tokens: one unit, so that a column and its limit compare at a glance."""
    return "–" if value is None else f"{value * 1000:,.0f} ms"


def number(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"
