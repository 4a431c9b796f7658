"""One queued generation of the in-process engine, as the gateway's protocol wants it."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from appliance.serving.types import Caller, Finished, GenerationEvent


class SourceStream(Protocol):
    """What is needed of `inference.generator.TextStream`."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    on_news: Callable[[], None] | None

    @property
    def num_completion_tokens(self) -> int: ...
    def take(self) -> Sequence[Any]: ...
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
    """One queued generation."""

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
        self._is_finished = False
        self._on_news: Callable[[], None] | None = None
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

    def listen(self, on_news: Callable[[], None]) -> None:
        self._on_news = self._stream.on_news = on_news

    def take(self) -> Sequence[GenerationEvent]:
        if self._is_finished:
            return ()
        if self._closing is None:
            events = [self._translate(event) for event in self._stream.take()]
        else:
            # What comes until it is closed is counted by the source's `aclose`.
            events = [self._closed_event()] if self._closing.done() else []
        self._is_finished = bool(events) and isinstance(events[-1], Finished)
        return events

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
            self._closing.add_done_callback(self._tell_closed)
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._abort()
        await self._stream.aclose()

    def _tell_closed(self, closing: "asyncio.Future[None]") -> None:
        if self._on_news is not None:
            self._on_news()
