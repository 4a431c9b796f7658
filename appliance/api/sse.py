"""Server-sent events of a reply in one of the dialects.

Everything that could refuse the request was decided before; what fails now is an error frame, and
then the stream ends without its usual end, so that no client takes half an answer for a whole one.
"""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from django.http import StreamingHttpResponse

from appliance.api.reply import KEY_CHECK_S, Piece, Reply, UsageCount
from appliance.errors import ApplianceError

logger = logging.getLogger(__name__)

# Proxies cut what is silent for 30 s or more.
KEEP_ALIVE_S = 10.0


class Frames(Protocol):
    """One dialect's frames, each whole."""

    def start(self, num_choices: int) -> bytes: ...
    def piece(self, piece: Piece) -> bytes:
        """New text and, at the end, the finish frame; empty when there is nothing to say."""

    def end(self, usage: UsageCount) -> bytes:
        """What follows the last piece of an answer that is whole."""

    def error(self, exc: ApplianceError) -> bytes: ...

    @property
    def keep_alive(self) -> bytes: ...


class EventStream(StreamingHttpResponse):
    """Hands its one generator to the server as it is: fewer hops a token, and closing it closes
    the generation."""

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        request_id: str,
        content_type: str = "text/event-stream; charset=utf-8",
    ) -> None:
        super().__init__(frames, content_type=content_type)
        self._frames = frames
        self["Cache-Control"] = "no-cache"
        self["X-Accel-Buffering"] = "no"
        self["X-Content-Type-Options"] = "nosniff"
        self["X-Request-Id"] = request_id

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._frames


async def event_stream(
    reply: Reply, frames: Frames, *, before_end: Callable[[], Awaitable[None]] | None = None
) -> AsyncIterator[bytes]:
    """`before_end` runs when the answer is whole, before its end is sent."""
    try:
        yield frames.start(len(reply.generations))
        sent_at = time.monotonic()
        is_whole = False
        while not is_whole:
            quiet_s = time.monotonic() - sent_at
            pieces = await reply.next_pieces(min(KEEP_ALIVE_S - quiet_s, KEY_CHECK_S)) or ()
            is_whole = reply.is_whole
            chunk = b"".join([frames.piece(piece) for piece in pieces])
            if is_whole and before_end is None:
                # The last words and the end are one piece on the wire.
                chunk += frames.end(reply.usage())
            elif not chunk and time.monotonic() - sent_at >= KEEP_ALIVE_S:
                chunk = frames.keep_alive
            if chunk:
                yield chunk
                sent_at = time.monotonic()
        if before_end is not None:
            await before_end()
            yield frames.end(reply.usage())
    except ApplianceError as exc:
        yield frames.error(exc)
    finally:
        await reply.aclose()
