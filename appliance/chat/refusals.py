"""Why there is no answer, in words: what was refused, and what to do about it."""

import uuid

from appliance.chat.protocol import GenerationError
from appliance.chat.services import Ask
from appliance.errors import ApplianceError

_KEPT = {
    "start": "Your message is still below. ",
    "edit": "Your new version is still open. ",
    "again": "",
    "continue": "The answer stays as it is. ",
}
_HINTS = {
    "insufficient_quota": "Send it again when tokens are left.",
    "queue_full": "Try again in a moment.",
    "storage_unavailable": "",
    "engine_unavailable": "Try again in a moment.",
    "rate_limit_exceeded": "Wait a little, then send it again.",
    # Its message says what to do.
    "conflict": "",
}
_DEFAULT_HINT = "Try again."
# These say all there is to do.
_WHOLE_HINTS = {
    "context_length_exceeded": "Nothing was left out. Start a new chat, or shorten the message.",
    "context_length_exceeded in a new chat": "Nothing was left out. Shorten the message.",
    "context_length_exceeded of continue": "The answer stays as it is. Start a new chat to go on.",
    "not_found": "Start a new chat.",
}


def refusal(
    failure: BaseException | None, conversation_id: uuid.UUID | None, ask: Ask, client_id: str
) -> GenerationError:
    """Why there is no answer. None: it was stopped before the door answered."""
    retry_after_s = None
    if failure is None:
        code, message, hint = "stopped", "Stopped before it began.", ""
    elif isinstance(failure, ApplianceError):
        code, message, retry_after_s = failure.code, failure.message, failure.retry_after_s
        hint = _hint(code, ask, is_new=conversation_id is None)
    else:
        code, hint = "internal_error", _KEPT[ask.kind] + _DEFAULT_HINT
        message = "The server made a mistake. An admin finds it in the log."
    return {
        "type": "generation.error",
        "conversation_id": None if conversation_id is None else str(conversation_id),
        "client_id": client_id,
        "code": code,
        "message": message,
        "hint": hint.strip(),
        "retry_after_s": retry_after_s,
    }


def _hint(code: str, ask: Ask, *, is_new: bool) -> str:
    narrow = f"{code} in a new chat" if is_new else f"{code} of {ask.kind}"
    whole = _WHOLE_HINTS.get(narrow) or _WHOLE_HINTS.get(code)
    return whole or _KEPT[ask.kind] + _HINTS.get(code, _DEFAULT_HINT)
