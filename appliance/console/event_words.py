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
    return writer(labels.get("username") or "someone", event.get("data") or {})


def _preempted(who: str, data: Mapping[str, Any]) -> Worded:
    lost = data.get("tokens_lost")
    tokens = f" ({_many(lost, 'token')} recomputed)" if lost else ""
    text = f"{who}'s request was preempted{tokens}: "
    if data.get("setting") == "max_blocks_per_owner":
        text += f"{who}'s answers had grown to the most blocks that one user may have."
        return Worded("warn", "undo", f"{text} {_many(data['value'], 'block')} would have done.")
    text += "the pool was full."
    if data.get("setting") == "slots":
        fits, slots = int(data["value"]), int(data.get("slots") or 0)
        if slots > fits:
            text += f" {_many(slots, 'slot')} are {slots - fits} more than the memory carries at"
            text += f" this length; with {fits} it would not have happened."
        else:
            text += f" {_many(fits, 'slot')} would have fitted."
    return Worded("warn", "undo", text)


def memory_wait_words(who: str, wait: Mapping[str, Any]) -> Worded:
    needed, available, kept = (int(wait[name]) for name in ("needed", "available", "kept"))
    text = f"{who}'s request waits: it needs {_many(needed, 'block')}, and {available:,} can be"
    text += " given out."
    if kept:
        text += f" {kept:,} of them are kept so that running answers can grow."
    return Worded("warn", "clock", text)


def _evicted(who: str, data: Mapping[str, Any]) -> Worded:
    count = data.get("blocks", 1)
    verb = "was" if count == 1 else "were"
    text = f"{_many(count, 'cached block')} {verb} given away to make room, oldest first."
    return Worded("", "retry", text)


def _admitted(who: str, data: Mapping[str, Any]) -> Worded | None:
    reused = data.get("cached_tokens") or 0
    if reused < REUSED_TOKENS_WORTH_A_LINE:
        return None
    return Worded("ok", "check", f"{who}'s prompt reused {_many(reused, 'token')} from the cache.")


def _aborted(who: str, data: Mapping[str, Any]) -> Worded | None:
    if data.get("detail") == KILLED:
        # Told with the admin's name by the one who did it.
        return None
    written = data.get("output_tokens") or 0
    if not written:
        return Worded("", "stop", f"{who}'s request ended before its first token.")
    return Worded("", "stop", f"{who}'s answer was stopped after {_many(written, 'token')}.")


def _failed(who: str, data: Mapping[str, Any]) -> Worded:
    if "num_requests" in data:
        with_it = _many(data["num_requests"], "request")
        why = _sentence(data.get("error"))
        return Worded("danger", "error", f"A step of the model with {with_it} failed: {why}.")
    return Worded("danger", "error", f"{who}'s request failed: {_sentence(data.get('detail'))}.")


def _rejected(who: str, data: Mapping[str, Any]) -> Worded:
    why = REJECTIONS.get(str(data.get("why")), "it could not be served as it was")
    return Worded("warn", "block", f"{who}'s request was turned away: {why}.")


def _tuned(who: str, data: Mapping[str, Any]) -> Worded | None:
    # Weights are told by name where they are set.
    changes = [
        f"{SETTING_WORDS.get(name, name)}: now {_told_value(name, str(value))}"
        for name, value in data.items()
        if name != "owner_weights"
    ]
    if not changes:
        return None
    return Worded("", "info", f"{'; '.join(changes)}.")


def _engine_failed(who: str, data: Mapping[str, Any]) -> Worded:
    why = _sentence(data.get("cause"))
    return Worded("danger", "error", f"The engine stopped: {why}. It is loaded again.")


def _engine_rebuilt(who: str, data: Mapping[str, Any]) -> Worded:
    return Worded("ok", "check", "The engine was loaded again and serves.")


def _engine_hung(who: str, data: Mapping[str, Any]) -> Worded:
    why = _sentence(data.get("cause"))
    return Worded("danger", "error", f"The engine was given up: {why}. Its answers were ended.")


def _engine_dead(who: str, data: Mapping[str, Any]) -> Worded:
    return Worded("danger", "error", f"{_sentence(data.get('cause'))}.")


def _swap_began(who: str, data: Mapping[str, Any]) -> Worded:
    return Worded("", "info", f"Changing to the model {data.get('model')}: answers may finish.")


def _swapped(who: str, data: Mapping[str, Any]) -> Worded:
    return Worded("ok", "check", f"The model {data.get('model')} serves now.")


def _swap_failed(who: str, data: Mapping[str, Any]) -> Worded:
    why = _sentence(data.get("error"))
    return Worded("danger", "error", f"The model {data.get('model')} was not loaded: {why}.")


REJECTIONS = {
    "QueueFull": "the waiting line is full",
    "PromptTooLong": "the prompt is too long",
    "InvalidPrompt": "the prompt cannot be read",
    "InvalidSamplingParams": "an option was out of its range",
    "EngineStopping": "the server is stopping",
}
SETTING_WORDS = {
    "slots": "Parallel slots",
    "max_model_len": "Context limit",
    "chat_max_tokens": "Longest answer in the chat",
    "reserved_interactive_slots": "Slots kept for chat",
    "max_num_batched_tokens": "Token budget a step",
    "max_waiting_requests": "Waiting requests at most",
    "max_waiting_tokens": "Waiting tokens at most",
    "enable_prefix_cache": "Prefix cache",
    "policy": "Batching",
    "speculation": "Lookahead",
    "max_running_per_owner": "Slots for one user at most",
    "max_blocks_per_owner": "Blocks for one user at most",
    "admission_headroom": "Head-room for growth",
    "kv_memory_share": "Share of memory for answers",
    "aging_s": "Longest wait before going first",
    "reserve_tokens": "Whole reservations",
    "owner_weights": "User weights",
    "class_weights": "Shares of kinds of requests",
}
# Kinds of requests, as people call them; in the order in which they are served by default.
CLASS_WORDS = {"interactive": "chat", "api": "scripts", "background": "background"}
_WRITERS = {
    "preempted": _preempted,
    "evicted": _evicted,
    "admitted": _admitted,
    "aborted": _aborted,
    "failed": _failed,
    "rejected": _rejected,
    "tuned": _tuned,
    "engine_failed": _engine_failed,
    "engine_rebuilt": _engine_rebuilt,
    "engine_hung": _engine_hung,
    "engine_dead": _engine_dead,
    "swap_began": _swap_began,
    "swapped": _swapped,
    "swap_failed": _swap_failed,
}


def _many(count: Any, what: str) -> str:
    return f"{int(count):,} {what}{'' if int(count) == 1 else 's'}"


def _sentence(text: Any) -> str:
    return str(text or "no reason was given").rstrip(".")


def _told_value(name: str, text: str) -> str:
    """A value as the engine's event has it, which is text."""
    if name != "class_weights":
        return f"{int(text):,}" if text.isdecimal() else text
    for kind, words in CLASS_WORDS.items():
        text = text.replace(kind, words)
    return value_words(text)


def value_words(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return ", ".join(
            f"{CLASS_WORDS.get(name, name)} {value_words(each)}" for name, each in value.items()
        )
    if value == "strict":
        return "in order"
    return f"{value:,}" if isinstance(value, int) else str(value)
