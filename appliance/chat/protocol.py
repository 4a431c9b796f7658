"""Every message of `/ws/chat/`, both ways, and the strict reading of what a browser sends.

A frame is one JSON object with a `type`. Unknown types, missing or extra fields, and values of a
wrong type are refused with an `error` message; the socket stays open.

Text frames of one answer are numbered by its characters: `generation.delta` carries the text after
`from_seq` up to `seq`. A browser that gets a `from_seq` other than the last `seq` it has, asks
again with `generation.subscribe`; `from_seq` 0 means: the text so far, replace what you have.
"""

import uuid
from typing import Any, Literal, NotRequired, TypedDict

from appliance.errors import BadRequest

# ---- close codes

CLOSE_BAD_DATA = 1003  # a binary frame
CLOSE_TOO_BIG = 1009  # a frame over MAX_FRAME_CHARS
CLOSE_TOO_MANY = 4429  # frames keep coming far over the rate limit
CLOSE_SIGNED_OUT = 4401  # no session, or it ended

# ---- limits

MAX_FRAME_CHARS = 600_000
MAX_TEXT_CHARS = 200_000
MAX_ID_CHARS = 64
_MAX_INT = 2**53

# ---- browser to server


class GenerationStart(TypedDict):
    """Send `text` and stream the answer. `conversation_id` None opens a new conversation."""

    type: Literal["generation.start"]
    conversation_id: uuid.UUID | None
    text: str
    client_id: str


class GenerationAgain(TypedDict):
    """Answer the last message of the user again, in place of the present answer."""

    type: Literal["generation.again"]
    conversation_id: uuid.UUID
    client_id: str


class GenerationEdit(TypedDict):
    """Put `text` in place of the user's message `message_id` and all after it; answer that."""

    type: Literal["generation.edit"]
    conversation_id: uuid.UUID
    message_id: int
    text: str
    client_id: str


class GenerationContinue(TypedDict):
    """Go on with the last answer, `message_id`, which has text and did not end by itself."""

    type: Literal["generation.continue"]
    conversation_id: uuid.UUID
    message_id: int
    client_id: str


class GenerationStop(TypedDict):
    type: Literal["generation.stop"]
    # None: the answer that `client_id` started and that has no conversation yet.
    conversation_id: uuid.UUID | None
    client_id: NotRequired[str]


class GenerationSubscribe(TypedDict):
    """Follow this conversation: first what is missing, then what comes.

    `last_seq` counts for the answer `message_id` only. Messages after `last_position` are sent
    in full first; without it none are.
    """

    type: Literal["generation.subscribe"]
    conversation_id: uuid.UUID
    last_seq: int
    message_id: NotRequired[int | None]
    last_position: NotRequired[int]


class Ping(TypedDict):
    type: Literal["ping"]


GenerationAsk = GenerationStart | GenerationAgain | GenerationEdit | GenerationContinue
ClientMessage = GenerationAsk | GenerationStop | GenerationSubscribe | Ping

# ---- server to browser


class ConversationData(TypedDict):
    id: str
    title: str
    pinned: bool


class MessageData(TypedDict):
    id: int
    conversation_id: str
    position: int
    role: str
    content: str
    state: str
    client_id: str
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    ttft_s: float | None
    duration_s: float | None
    finish_reason: str
    error: str


class ConversationCreated(TypedDict):
    type: Literal["conversation.created"]
    conversation: ConversationData
    client_id: str


class ConversationUpdated(TypedDict):
    """Title, pin or place in the list changed. `running`: an answer is being written."""

    type: Literal["conversation.updated"]
    conversation: ConversationData
    running: bool


class ConversationDeleted(TypedDict):
    type: Literal["conversation.deleted"]
    conversation_id: str


class MessageSaved(TypedDict):
    """A message in full. `follows`: position of the one before it, -1 without one.

    What a browser shows between the two is no part of the conversation any more.
    """

    type: Literal["message.saved"]
    message: MessageData
    follows: int


class GenerationIdle(TypedDict):
    """Answer to a subscription: nothing is being written now."""

    type: Literal["generation.idle"]
    conversation_id: str


class GenerationQueued(TypedDict):
    type: Literal["generation.queued"]
    conversation_id: str
    client_id: str
    ahead: int
    estimated_wait_s: float | None


class GenerationReading(TypedDict):
    type: Literal["generation.reading"]
    conversation_id: str
    client_id: str
    done_tokens: int
    prompt_tokens: int


class GenerationDelta(TypedDict):
    type: Literal["generation.delta"]
    conversation_id: str
    message_id: int
    from_seq: int
    seq: int
    text: str
    # Of this generation; 0 while there is only what was there before it went on.
    completion_tokens: int


class GenerationFinished(TypedDict):
    """The answer in full, with usage and times. Also when it was stopped or broke off."""

    type: Literal["generation.finished"]
    message: MessageData


class GenerationError(TypedDict):
    """No answer. `message` says what and why, `hint` what to do.

    The text that was sent is not kept by the server: the browser puts it back to be sent again.
    """

    type: Literal["generation.error"]
    conversation_id: str | None
    client_id: str
    code: str
    message: str
    hint: str
    retry_after_s: float | None


class QuotaData(TypedDict):
    # "day" or "month": what limit, use and what is left are of.
    window: str
    limit_tokens: int | None
    used_tokens: int
    left_tokens: int | None
    resets_at: str


class QuotaUpdated(TypedDict):
    type: Literal["quota.updated"]
    quota: QuotaData


class ErrorMessage(TypedDict):
    """A frame was refused. No answer of this socket is harmed by it."""

    type: Literal["error"]
    code: str
    message: str


class Pong(TypedDict):
    type: Literal["pong"]


ServerMessage = (
    ConversationCreated
    | ConversationUpdated
    | ConversationDeleted
    | MessageSaved
    | GenerationIdle
    | GenerationQueued
    | GenerationReading
    | GenerationDelta
    | GenerationFinished
    | GenerationError
    | QuotaUpdated
    | ErrorMessage
    | Pong
)

# ---- reading

_FIELDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    # type: (needed, allowed besides)
    "generation.start": (frozenset({"conversation_id", "text", "client_id"}), frozenset()),
    "generation.again": (frozenset({"conversation_id", "client_id"}), frozenset()),
    "generation.edit": (
        frozenset({"conversation_id", "message_id", "text", "client_id"}),
        frozenset(),
    ),
    "generation.continue": (frozenset({"conversation_id", "message_id", "client_id"}), frozenset()),
    "generation.stop": (frozenset({"conversation_id"}), frozenset({"client_id"})),
    "generation.subscribe": (
        frozenset({"conversation_id", "last_seq"}),
        frozenset({"message_id", "last_position"}),
    ),
    "ping": (frozenset(), frozenset()),
}


# Fields that may be null elsewhere and not here.
_NEVER_NULL: dict[str, tuple[str, ...]] = {
    "generation.again": ("conversation_id",),
    "generation.edit": ("conversation_id", "message_id"),
    "generation.continue": ("conversation_id", "message_id"),
    "generation.subscribe": ("conversation_id",),
}


def parse_client_message(frame: object) -> ClientMessage:
    """The message with its ids as UUID. Raises BadRequest naming the field and what is allowed."""
    if not isinstance(frame, dict):
        raise BadRequest(f"A message is a JSON object; got {_kind(frame)}.")
    kind = frame.get("type")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise BadRequest(f"type is {_short(kind)}; allowed are {', '.join(_FIELDS)}.", param="type")
    needed, besides = _FIELDS[kind]
    names = set(frame) - {"type"}
    if missing := needed - names:
        raise BadRequest(f"{kind} needs {', '.join(sorted(missing))}.", param=min(missing))
    if extra := names - needed - besides:
        raise BadRequest(f"{kind} does not take {_short(min(extra))}.", param="type")
    read: dict[str, Any] = {"type": kind}
    for name in names:
        read[name] = _READERS[name](name, frame[name])
    for name in _NEVER_NULL.get(kind, ()):
        if read[name] is None:
            raise BadRequest(f"{kind} needs a {name}.", param=name)
    if kind == "generation.stop" and read["conversation_id"] is None and "client_id" not in read:
        raise BadRequest(f"{kind} needs a conversation_id or a client_id.", param="client_id")
    return read  # type: ignore[return-value]


def _uuid_or_none(name: str, value: object) -> uuid.UUID | None:
    if value is None:
        return None
    if isinstance(value, str) and len(value) == 36:
        try:
            return uuid.UUID(value)
        except ValueError:
            pass
    raise BadRequest(
        f"{name} is {_short(value)}; a conversation's id or null is allowed.", param=name
    )


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{name} is {_kind(value)}; a text is allowed.", param=name)
    if not value.strip():
        raise BadRequest("The message is empty. Write something first.", param=name)
    if len(value) > MAX_TEXT_CHARS:
        raise BadRequest(
            f"The message has {len(value):,} characters; at most {MAX_TEXT_CHARS:,} are allowed. "
            "Send it in parts.",
            param=name,
        )
    if "\x00" in value:
        raise BadRequest("The message holds a NUL character, which cannot be kept.", param=name)
    return value


def _client_id(name: str, value: object) -> str:
    if not isinstance(value, str) or not 8 <= len(value) <= MAX_ID_CHARS or not value.isascii():
        raise BadRequest(f"{name} must be 8 to {MAX_ID_CHARS} plain characters.", param=name)
    if not value.isprintable():
        raise BadRequest(f"{name} must be 8 to {MAX_ID_CHARS} plain characters.", param=name)
    return value


def _count(name: str, value: object, low: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < _MAX_INT:
        raise BadRequest(
            f"{name} is {_short(value)}; a whole number from {low} is allowed.", param=name
        )
    return value


_READERS: dict[str, Any] = {
    "conversation_id": _uuid_or_none,
    "text": _text,
    "client_id": _client_id,
    "last_seq": _count,
    "message_id": lambda name, value: None if value is None else _count(name, value),
    "last_position": lambda name, value: _count(name, value, low=-1),
}


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return names.get(type(value), "a number")


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, str | int | float | bool) else _kind(value)
    return text if len(text) <= 60 else text[:57] + "..."
