"""Server-sent events of a reply in one of the dialects.

Everything that could refuse the request was decided before, but for a request that stands in line
for a limit: its stream is open meanwhile and tells the place. What fails then is an error frame,
and the stream ends without its usual end, so that no client takes half an answer for a whole one.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol

from django.http import StreamingHttpResponse

from appliance.api.reply import KEY_CHECK_S, Piece, Reply, UsageCount
from appliance.errors import ApplianceError
from appliance.serving.news import News
from appliance.serving.turns import Told
from appliance.serving.types import Queued

logger = logging.getLogger(__name__)

# Proxies cut what is silent for 30 s or more.
KEEP_ALIVE_S = 10.0

BeforeEnd = Callable[[Reply], Awaitable[None]]


class OpenReply(Protocol):
    """`reply_open` with all but its last argument."""

    def __call__(self, *, told: Told | None = None) -> Coroutine[Any, Any, Reply]: ...


class Frames(Protocol):
    """One dialect's frames, each whole."""

    def start(self, num_choices: int, prompt_tokens: int) -> bytes: ...
    def waiting(self, ahead: int) -> bytes:
        """That so many are served first; empty where a dialect cannot say that."""

    def piece(self, piece: Piece) -> bytes:
        """New text and, at the end, the finish frame; empty when there is nothing to say."""

    def end(self, usage: UsageCount) -> bytes:
        """What follows the last piece of an answer that is whole."""

    def error(self, exc: ApplianceError) -> bytes: ...

    @property
    def keep_alive(self) -> bytes: ...


class CommentedFrames:
    """What the event streams of all dialects have in common: comments, which no client reads."""

    keep_alive = b": keep-alive\n\n"

    def waiting(self, ahead: int) -> bytes:
        return b": waiting, %d ahead\n\n" % ahead


class EventStream(StreamingHttpResponse):
    """Hands its one generator to the server as it is: fewer hops a token, and closing it closes
    the generation."""

    def __init__(self, frames: AsyncIterator[bytes], request_id: str, content_type: str) -> None:
        super().__init__(frames, content_type=content_type)
        self._frames = frames
        self["Cache-Control"] = "no-cache"
        self["X-Accel-Buffering"] = "no"
        self["X-Content-Type-Options"] = "nosniff"
        if request_id:
            self["X-Request-Id"] = request_id

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._frames


async def streamed(
    open_reply: OpenReply,
    frames: Frames,
    *,
    before_end: BeforeEnd | None = None,
    content_type: str = "text/event-stream; charset=utf-8",
) -> EventStream:
    """The answer to a request, as soon as it is admitted or stands in line.

    `before_end` runs when the answer is whole, before its end is sent. Raises what `open_reply`
    raises, unless it had to wait.
    """
    line = _Line(open_reply)
    await line.settled()
    if line.opening.done():
        reply = line.opening.result()
        stream = event_stream(reply, frames, before_end=before_end)
        return EventStream(stream, reply.request_id, content_type)
    return EventStream(_from_the_line(line, frames, before_end), "", content_type)


class _Line:
    """A reply that is being opened, and its place where it has to wait for a limit."""

    def __init__(self, open_reply: OpenReply) -> None:
        self.ahead: int | None = None
        self.news = News()
        self.opening = asyncio.ensure_future(open_reply(told=self._take_place))
        self.opening.add_done_callback(lambda _: self.news.ring())

    def _take_place(self, place: Queued) -> None:
        self.ahead = place.ahead
        self.news.ring()

    async def settled(self) -> None:
        """Until it is admitted, refused or in line; a caller who leaves before leaves the line."""
        try:
            while self.ahead is None and not self.opening.done():
                await self.news.wait()
        except asyncio.CancelledError:
            self.opening.cancel()
            raise


async def _from_the_line(
    line: _Line, frames: Frames, before_end: BeforeEnd | None
) -> AsyncIterator[bytes]:
    try:
        while not line.opening.done():
            # Said again from time to time: that keeps the connection open.
            yield frames.waiting(line.ahead or 0) or frames.keep_alive
            await line.news.wait(KEEP_ALIVE_S)
        reply = line.opening.result()
    except ApplianceError as exc:
        yield frames.error(exc)
        return
    finally:
        line.news.close()
        line.opening.cancel()
    async with aclosing(event_stream(reply, frames, before_end=before_end)) as stream:
        async for data in stream:
            yield data


async def event_stream(
    reply: Reply, frames: Frames, *, before_end: BeforeEnd | None = None
) -> AsyncIterator[bytes]:
    """An admitted reply to its end; closes it in any case."""
    try:
        yield frames.start(len(reply.generations), reply.generations[0].prompt_tokens)
        sent_at = time.monotonic()
        told: int | None = None
        is_whole = False
        while not is_whole:
            quiet_s = time.monotonic() - sent_at
            pieces = await reply.next_pieces(min(KEEP_ALIVE_S - quiet_s, KEY_CHECK_S)) or ()
            is_whole = reply.is_whole
            chunk = b"".join([frames.piece(piece) for piece in pieces])
            if is_whole and before_end is None:
                # The last words and the end are one piece on the wire.
                chunk += frames.end(reply.usage())
            elif not chunk:
                if reply.ahead is not None and reply.ahead != told:
                    told = reply.ahead
                    chunk = frames.waiting(told)
                elif time.monotonic() - sent_at >= KEEP_ALIVE_S:
                    chunk = frames.keep_alive
            if chunk:
                yield chunk
                sent_at = time.monotonic()
        if before_end is not None:
            await before_end(reply)
            yield frames.end(reply.usage())
    except ApplianceError as exc:
        yield frames.error(exc)
    finally:
        await reply.aclose()
