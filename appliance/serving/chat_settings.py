"""Live settings of the chat. The engine knows nothing of them: scripts keep OpenAI's rules.

They are tuned, kept and shown with the engine's own, by `live_settings`. Values are replaced whole,
so any thread may read them.
"""

from collections.abc import Mapping
from typing import Any

from appliance.errors import BadRequest

# Of a setting that nobody changed.
DEFAULTS: Mapping[str, Any] = {"chat_max_tokens": 2048}
LEAST_TOKENS, MOST_TOKENS = 16, 1_000_000

_values: Mapping[str, Any] = DEFAULTS


def chat_setting(name: str) -> Any:
    return _values[name]


def chat_settings_check(changes: Mapping[str, Any]) -> None:
    """Raises BadRequest with the name, what it got and what is allowed."""
    for name, value in changes.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not LEAST_TOKENS <= value <= MOST_TOKENS:
            raise BadRequest(
                f"{name} is {_short(value)}; a whole number from {LEAST_TOKENS} to "
                f"{MOST_TOKENS:,} is allowed.",
                param=name,
            )


def chat_settings_apply(changes: Mapping[str, Any]) -> None:
    """Answers that are begun from now on go by `changes`, which were checked."""
    global _values
    _values = {**_values, **changes}


def chat_settings_shown(model: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Name -> requested, effective and reason, with the `model` of the engine's state."""
    asked = _values["chat_max_tokens"]
    context = (model or {}).get("context_tokens") or asked
    reason = "no answer is longer than the context limit" if context < asked else ""
    return {
        "chat_max_tokens": {
            "requested": asked,
            "effective": min(asked, context),
            "reason": reason,
        }
    }


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
