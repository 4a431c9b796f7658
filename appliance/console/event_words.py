"""The engine's events as sentences: what happened, and why. None for what is not news."""

from collections.abc import Mapping
from typing import Any, NamedTuple

# What the owner of a killed request reads, and the reason that the engine gets.
KILLED = "An admin stopped this answer."
# A prompt that reused less than this is not worth a line.
REUSED_TOKENS_WORTH_A_LINE = 1024


class Worded(NamedTuple):
    # ok, warn, danger or "" (neutral), and the name of an icon in static/icons.svg.
    tone: str
    icon: str
    text: str


def event_words(event: Mapping[str, Any]) -> Worded | None:
    writer = _WRITERS.get(str(event.get("kind")))
    if writer is None:
        return None
    labels = event.get("labels") or {}
    return writer(labels.get("user") or "someone", event.get("data") or {})


def _preempted(who: str, data: Mapping[str, Any]) -> Worded:
    again = data.get("recomputed_tokens", data.get("num_computed_tokens"))
    tokens = f" ({_many(again, 'token')} recomputed)" if again else ""
    why = data.get("reason") or "the pool was full"
    return Worded("warn", "undo", f"{who}'s request was preempted{tokens}: {why}.")


def _evicted(who: str, data: Mapping[str, Any]) -> Worded:
    count = data.get("num_blocks", 1)
    verb = "was" if count == 1 else "were"
    text = f"{_many(count, 'cached block')} {verb} given away to make room, oldest first."
    return Worded("", "retry", text)


def _admitted(who: str, data: Mapping[str, Any]) -> Worded | None:
    reused = data.get("num_cached_tokens") or 0
    if reused < REUSED_TOKENS_WORTH_A_LINE:
        return None
    return Worded("ok", "check", f"{who}'s prompt reused {_many(reused, 'token')} from the cache.")


def _aborted(who: str, data: Mapping[str, Any]) -> Worded | None:
    if data.get("reason") == KILLED:
        # Told with the admin's name by the one who did it.
        return None
    written = data.get("num_output_tokens")
    after = f" after {_many(written, 'token')}" if written is not None else ""
    freed = data.get("num_blocks")
    verb = "is" if freed == 1 else "are"
    free = f" {_many(freed, 'block')} {verb} free again." if freed else ""
    return Worded("", "stop", f"{who} stopped an answer{after}.{free}")


def _failed(who: str, data: Mapping[str, Any]) -> Worded:
    why = str(data.get("reason") or data.get("error") or "the engine gave no reason").rstrip(".")
    return Worded("danger", "error", f"{who}'s request failed: {why}.")


def _rejected(who: str, data: Mapping[str, Any]) -> Worded:
    why = str(data.get("reason") or "the waiting line is full").rstrip(".")
    return Worded("warn", "block", f"{who}'s request was turned away: {why}.")


def _tuned(who: str, data: Mapping[str, Any]) -> Worded:
    name = SETTING_WORDS.get(str(data.get("name")), str(data.get("name", "A setting")))
    before, after = data.get("before"), data.get("after", data.get("value"))
    change = (
        f"{value_words(before)} → {value_words(after)}"
        if before is not None
        else f"now {value_words(after)}"
    )
    effective = data.get("effective")
    got = f" It runs at {value_words(effective)}." if effective not in (None, after) else ""
    return Worded("", "info", f"{name}: {change}.{got}")


SETTING_WORDS = {
    "slots": "Parallel slots",
    "reserved_interactive_slots": "Slots kept for chat",
    "token_budget": "Token budget a step",
    "context_limit": "Context limit",
    "prefix_cache": "Prefix cache",
}
_WRITERS = {
    "preempted": _preempted,
    "evicted": _evicted,
    "admitted": _admitted,
    "aborted": _aborted,
    "failed": _failed,
    "rejected": _rejected,
    "tuned": _tuned,
}


def _many(count: Any, what: str) -> str:
    return f"{int(count):,} {what}{'' if int(count) == 1 else 's'}"


def value_words(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)
