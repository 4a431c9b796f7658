"""One queued generation of the in-process engine, as the gateway's protocol wants it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol

from appliance.serving.types import Caller, Finished, GenerationEvent

# How long a closing stream waits for the reader that holds it.
_READER_WAIT_S = 10.0


class SourceStream(Protocol):
    """What is needed of `inference.generator.TextStream`."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int

    @property
    def num_completion_tokens(self) -> int: ...
    async def __anext__(self) -> Any: ...
    async def aclose(self) -> None: ...


def labels_of(caller: Caller) -> Mapping[str, str]:
    """What the engine keeps with a request, and shows without reading it."""
    return {
        "username": caller.username,
        "user_id": str(caller.user_id),
        "source": caller.source,
        "key_prefix": caller.key_prefix or "",
        "key_id": "" if caller.key_id is None else str(caller.key_id),
    }


class EngineStream:
    """One queued generation. One task may iterate it while another closes it."""

    def __init__(
        self,
        stream: SourceStream,
        abort: Callable[[], object],
        translate: Callable[[Any], GenerationEvent],
    ) -> None:
        self._stream = stream
        self._abort = abort
        self._translate = translate
        self._opened_s = time.monotonic()
        self._is_reading = False
        # Made by who closes while another task reads; done when that one has left the stream.
        self._reader_left: asyncio.Future[None] | None = None
        self._closing: asyncio.Future[None] | None = None

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    @property
    def prompt_tokens(self) -> int:
        return self._stream.num_prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return self._stream.num_cached_tokens

    @property
    def completion_tokens(self) -> int:
        return self._stream.num_completion_tokens

    async def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        is_finished = False
        while not is_finished:
            if self._closing is not None:
                await asyncio.shield(self._closing)
                yield self._closed_event()
                return
            event = self._translate(await self._next())
            is_finished = isinstance(event, Finished)
            yield event

    async def _next(self) -> Any:
        self._is_reading = True
        try:
            return await anext(self._stream)
        finally:
            self._is_reading = False
            if self._reader_left is not None and not self._reader_left.done():
                self._reader_left.set_result(None)

    def _closed_event(self) -> Finished:
        return Finished(
            finish_reason="abort",
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            queue_s=0.0,
            ttft_s=None,
            duration_s=time.monotonic() - self._opened_s,
        )

    async def aclose(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._abort()
        # Two tasks must not read the engine's stream at once: the reader gets its end first.
        if self._is_reading:
            self._reader_left = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._reader_left], timeout=_READER_WAIT_S)
        await self._stream.aclose()
