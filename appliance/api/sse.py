"""Server-sent events of a reply in one of the dialects.

Everything that could refuse the request was decided before; what fails now is an error frame, and
then the stream ends without `[DONE]`, so that no client takes half an answer for a whole one.
"""

import logging
import time
from collections.abc import AsyncIterator
from typing import Protocol

import orjson
from django.http import StreamingHttpResponse

from appliance.api.envelope import error_fields
from appliance.api.reply import KEY_CHECK_S, Piece, Reply, UsageCount
from appliance.errors import ApplianceError

logger = logging.getLogger(__name__)

# Proxies cut what is silent for 30 s or more.
KEEP_ALIVE_S = 10.0
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class Frames(Protocol):
    """One dialect's frames, each whole: `data: …` and the blank line."""

    def start(self, num_choices: int) -> bytes: ...
    def piece(self, piece: Piece) -> bytes:
        """New text and, at the end, the finish frame; empty when there is nothing to say."""

    def usage(self, usage: UsageCount) -> bytes: ...


class EventStream(StreamingHttpResponse):
    """Hands its one generator to the server as it is: fewer hops a token, and closing it closes
    the generation."""

    def __init__(self, frames: AsyncIterator[bytes], request_id: str) -> None:
        super().__init__(frames, content_type="text/event-stream; charset=utf-8")
        self._frames = frames
        self["Cache-Control"] = "no-cache"
        self["X-Accel-Buffering"] = "no"
        self["X-Content-Type-Options"] = "nosniff"
        self["X-Request-Id"] = request_id

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._frames


async def event_stream(
    reply: Reply, frames: Frames, *, include_usage: bool
) -> AsyncIterator[bytes]:
    try:
        yield frames.start(len(reply.generations))
        sent_at = time.monotonic()
        while True:
            quiet_s = time.monotonic() - sent_at
            pieces = await reply.next_pieces(min(KEEP_ALIVE_S - quiet_s, KEY_CHECK_S))
            if pieces is None:
                break
            chunk = b"".join([frames.piece(piece) for piece in pieces])
            if not chunk and time.monotonic() - sent_at >= KEEP_ALIVE_S:
                chunk = KEEP_ALIVE
            if chunk:
                yield chunk
                sent_at = time.monotonic()
        if include_usage:
            yield frames.usage(reply.usage())
        yield DONE
    except ApplianceError as exc:
        yield error_frame(exc)
    finally:
        await reply.aclose()


def error_frame(exc: ApplianceError) -> bytes:
    return b"data: " + orjson.dumps(error_fields(exc)) + b"\n\n"
