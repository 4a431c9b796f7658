"""One generation as text: the engine's updates through the detokenizer. Event loop only."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from inference.errors import InferenceError
from inference.outputs import (
    GenerationFinished,
    PromptProgress,
    QueueUpdate,
    RunnerInfo,
    StreamUpdate,
    TextDelta,
    TextEvent,
)
from inference.request import FinishReason, Request
from inference.text.detokenizer import Detokenized, Detokenizer

# How long `aclose` waits for the engine to say how many tokens it made.
_LAST_UPDATE_S = 5.0


class UpdateStream(Protocol):
    """What the generator needs of `streams.RequestStream`."""

    on_news: Callable[[], None] | None

    async def __anext__(self) -> StreamUpdate: ...
    def take(self) -> StreamUpdate | None: ...
    def close(self) -> None: ...


class GeneratingEngine(Protocol):
    """What the generator needs of `engine.Engine`."""

    @property
    def info(self) -> RunnerInfo: ...
    @property
    def max_len(self) -> int: ...
    def add_request(self, request: Request) -> UpdateStream: ...
    def abort(
        self, request_id: str, finish_reason: FinishReason = ..., detail: str | None = ...
    ) -> bool: ...


class TextStream:
    """Events of one generation; the last is its one GenerationFinished.

    Read it with `async for`, or set `on_news` and `take` what is there.
    Close it, or use it in `async with`: leaving before the last event, and cancelling a pending
    `__anext__`, abort the request. The counts stay readable and true afterwards.
    """

    def __init__(
        self,
        engine: GeneratingEngine,
        request: Request,
        updates: UpdateStream,
        detokenizer: Detokenizer,
    ) -> None:
        self.request_id = request.request_id
        self.num_prompt_tokens = request.num_prompt_tokens
        # Prompt tokens that were found in the prefix cache.
        self.num_cached_tokens = 0
        # Set with the last event, or by `aclose`.
        self.finish_reason: FinishReason | None = None
        self._engine = engine
        self._request = request
        self._updates = updates
        self._detokenizer = detokenizer
        self._events: deque[TextEvent] = deque()
        self._first_delta_s: float | None = None
        self._last_progress: PromptProgress | None = None

    @property
    def num_completion_tokens(self) -> int:
        """Tokens that the engine made, up to the one that completed a stop string."""
        return self._detokenizer.num_tokens

    @property
    def on_news(self) -> Callable[[], None] | None:
        """Called on the event loop when there may be something to take."""
        return self._updates.on_news

    @on_news.setter
    def on_news(self, call: Callable[[], None] | None) -> None:
        self._updates.on_news = call

    def take(self) -> list[TextEvent]:
        """The events since the last look, without waiting."""
        if self.finish_reason is None:
            update = self._updates.take()
            if update is not None:
                self._absorb(update)
        events = list(self._events)
        self._events.clear()
        return events

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextEvent:
        while not self._events:
            if self.finish_reason is not None:
                raise StopAsyncIteration
            await self._read()
        return self._events.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the request if it still runs; returns when its last token is counted. Idempotent."""
        self._events.clear()
        if self.finish_reason is not None:
            return
        self._engine.abort(self.request_id)
        try:
            async with asyncio.timeout(_LAST_UPDATE_S):
                while self.finish_reason is None:
                    await self._read()
        except TimeoutError:
            self.finish_reason = FinishReason.ABORT
        finally:
            self.finish_reason = self.finish_reason or FinishReason.ABORT
            self._events.clear()
            self._updates.close()

    async def _read(self) -> None:
        """Wait for the next update and turn it into events."""
        try:
            update = await anext(self._updates)
        except StopAsyncIteration:
            self._finish(FinishReason.ABORT, None)
            return
        except InferenceError as exc:
            self._finish(FinishReason.ERROR, str(exc))
            return
        except asyncio.CancelledError:
            self._engine.abort(self.request_id)
            raise
        self._absorb(update)

    def _absorb(self, update: StreamUpdate) -> None:
        self._add_waiting_events(update)
        self._add_text(self._detokenizer.feed(update.token_ids, update.logprobs))
        if self._detokenizer.stop_found is not None:
            stop = self._detokenizer.stop_found
            self._engine.abort(self.request_id, FinishReason.STOP, stop)
            self._finish(FinishReason.STOP, stop)
            self._updates.close()
        elif update.finish_reason is not None:
            self._finish(update.finish_reason, update.finish_detail)

    def _add_waiting_events(self, update: StreamUpdate) -> None:
        self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
        if update.queue_position is not None:
            self._events.append(QueueUpdate(update.queue_position, update.estimated_wait_s))
            return
        if update.finish_reason is not None or self.num_completion_tokens:
            return
        progress = PromptProgress(
            update.num_computed_prompt_tokens, self.num_prompt_tokens, self.num_cached_tokens
        )
        if progress.num_computed_tokens and progress != self._last_progress:
            self._last_progress = progress
            self._events.append(progress)

    def _add_text(self, new: Detokenized) -> None:
        if not new.text and not new.logprobs:
            return
        if self._first_delta_s is None:
            self._first_delta_s = time.monotonic()
        self._events.append(TextDelta(new.text, self.num_completion_tokens, new.logprobs))

    def _finish(self, reason: FinishReason, detail: str | None) -> None:
        self._add_text(self._detokenizer.finish())
        now_s, arrival_s = time.monotonic(), self._request.arrival_s
        started_s = self._request.first_scheduled_s
        self.finish_reason = reason
        self._events.append(
            GenerationFinished(
                finish_reason=reason,
                detail=detail,
                num_prompt_tokens=self.num_prompt_tokens,
                num_cached_tokens=self.num_cached_tokens,
                num_completion_tokens=self.num_completion_tokens,
                queue_s=(now_s if started_s is None else started_s) - arrival_s,
                ttft_s=None if self._first_delta_s is None else self._first_delta_s - arrival_s,
                duration_s=now_s - arrival_s,
                has_started=started_s is not None,
            )
        )
