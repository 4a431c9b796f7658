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
_FIELDS = {field.name: field for field in FIELDS}


def replay_rules(state: Mapping[str, Any], asked: Mapping[str, str]) -> Rules:
    """`asked` has settings by name, as text; a word such as "auto" stands for what holds now.

    Raises BadRequest for a name that no replay knows, or a value out of range.
    """
    unknown = asked.keys() - _USED.keys()
    if unknown:
        name = min(unknown)[:40]
        raise BadRequest(f"{name} is not replayed; {', '.join(_USED)} are.", param=name)
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
        blocks=int(kv.get("blocks_total") or 0),
        block_size=int(kv.get("block_size") or 16),
    )


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
