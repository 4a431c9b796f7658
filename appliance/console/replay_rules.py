"""Rules of a replay: the engine's settings as they are, and those of a query instead."""

from collections.abc import Mapping
from typing import Any

from appliance.console.replay import Rules
from appliance.console.setting_catalogue import FIELDS, Field
from appliance.errors import BadRequest

_MAX_DIGITS = 12
# Setting -> field of `Rules`.
_USED = {
    "slots": "slots",
    "reserved_interactive_slots": "reserved",
    "max_model_len": "context_tokens",
    "max_running_per_owner": "per_owner",
    "admission_headroom": "headroom",
}
_SHARE = "kv_memory_share"
_FIELDS = {field.name: field for field in FIELDS}


def replay_rules(state: Mapping[str, Any], asked: Mapping[str, str]) -> Rules:
    """`asked` has settings by name, as text; a word such as "auto" stands for what holds now.

    Raises BadRequest for a name that no replay knows, or a value out of range.
    """
    known = (*_USED, _SHARE)
    unknown = asked.keys() - set(known)
    if unknown:
        name = min(unknown)[:40]
        raise BadRequest(f"{name} is not replayed; {', '.join(known)} are.", param=name)
    settings = {**(state.get("settings") or {}), "slots": state.get("slots")}
    kv = state.get("kv") or {}
    values: dict[str, Any] = {}
    for name, rule in _USED.items():
        text = asked.get(name)
        if text is None or text == _FIELDS[name].word:
            values[rule] = (settings.get(name) or {}).get("effective") or 0
        else:
            values[rule] = _number(_FIELDS[name], text)
    return Rules(
        **{**values, "slots": max(1, values["slots"])},
        blocks=_blocks(kv, settings.get(_SHARE) or {}, asked.get(_SHARE)),
        block_size=int(kv.get("block_size") or 16),
    )


def _blocks(kv: Mapping[str, Any], share: Mapping[str, Any], text: str | None) -> int:
    """Of the pool; with another share of the memory it has as many more or fewer blocks."""
    blocks, now = int(kv.get("blocks_total") or 0), share.get("effective")
    if text is None or text == _FIELDS[_SHARE].word:
        return blocks
    wanted = _number(_FIELDS[_SHARE], text)
    # A word instead of a number: this memory cannot be changed here.
    return max(1, int(blocks * wanted / now)) if isinstance(now, float) and now else blocks


def _number(field: Field, text: str) -> float:
    is_whole = field.step >= 1
    digits = text if is_whole else text.replace(".", "", 1)
    if text.isascii() and digits.isdigit() and len(text) <= _MAX_DIGITS:
        number = int(text) if is_whole else float(text)
        if field.low <= number <= field.high:
            return number
    kind = "whole number" if is_whole else "number"
    raise BadRequest(
        f"{field.name} must be a {kind} from {field.low:g} to {field.high:,.16g}.",
        param=field.name,
    )
