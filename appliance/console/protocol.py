"""Messages of `/ws/console/`, and the strict reading of what a browser sends.

The socket only tells: changes go over HTTP, where CSRF and the audit are. To the browser:

- `console.update`: `n` (number on this socket), `base` and `tick`. `base` is -1 when the message
  holds everything; otherwise it equals the tick of the update before, or one was lost and the
  browser asks to resync. What did not change is absent.
- `console.error`: `code` and `message` for a message that could not be read.

From the browser: `console.ack` with `n` after each update (the next ones wait for it, so a slow
page gets merged updates), `console.pause`, `console.resume`, `console.resync`.
"""

from typing import Any, Literal, NamedTuple

import orjson

from appliance.errors import BadRequest

CLOSE_BAD_DATA = 1003
CLOSE_TOO_BIG = 1009
CLOSE_ERROR = 1011
CLOSE_NOT_SIGNED_IN = 4401
CLOSE_NOT_ADMIN = 4403
CLOSE_TOO_MANY_MESSAGES = 4429

MAX_MESSAGE_BYTES = 1024
# An honest page sends an acknowledgement for each of at most four updates a second.
MAX_MESSAGES_A_SECOND = 40
# Updates on the way to a page that has not acknowledged them.
MAX_UNACKNOWLEDGED = 2

MessageType = Literal["console.ack", "console.pause", "console.resume", "console.resync"]
_FIELDS: dict[str, frozenset[str]] = {
    "console.ack": frozenset({"type", "n"}),
    "console.pause": frozenset({"type"}),
    "console.resume": frozenset({"type"}),
    "console.resync": frozenset({"type"}),
}


class ClientMessage(NamedTuple):
    type: MessageType
    # Of an acknowledgement: the number of the update.
    n: int = 0


def parse_client_message(text: str) -> ClientMessage:
    """Raises BadRequest with what is wrong; never anything else."""
    try:
        message: Any = orjson.loads(text)
    except (orjson.JSONDecodeError, UnicodeEncodeError):
        raise BadRequest("A message must be JSON.") from None
    if not isinstance(message, dict):
        raise BadRequest("A message must be a JSON object.")
    kind = message.get("type")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise BadRequest(f"`type` must be one of {', '.join(_FIELDS)}.", param="type")
    if message.keys() != _FIELDS[kind]:
        raise BadRequest(f"{kind} has the fields {', '.join(sorted(_FIELDS[kind]))}.")
    n = message.get("n", 0)
    if type(n) is not int or n < 0:
        raise BadRequest("`n` must be a whole number.", param="n")
    return ClientMessage(kind, n)  # type: ignore[arg-type]
