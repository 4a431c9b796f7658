"""A stream of the gateway's protocol whose events a test writes as an async generator."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from appliance.serving.types import Finished, GenerationEvent


class ScriptedStream:
    """Needs `events` and the counts of the protocol.

    Gives one event a look unless told otherwise, so that tests see how far it was read.
    """

    most_at_once = 1
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    _script: AsyncIterator[GenerationEvent] | None = None
    # The step that waits for something, with the future it waits for.
    _step: Any = None
    _waits_for: "asyncio.Future[Any] | None" = None
    _on_news: Callable[[], None] | None = None
    _is_closed = _is_finished = False

    def events(self) -> AsyncIterator[GenerationEvent]:
        raise NotImplementedError

    def listen(self, on_news: Callable[[], None]) -> None:
        self._on_news = on_news

    def take(self) -> Sequence[GenerationEvent]:
        taken: list[GenerationEvent] = []
        while len(taken) < self.most_at_once and not self._is_finished:
            event = self._closed_event() if self._is_closed else self._next()
            if event is None:
                break
            taken.append(event)
            self._is_finished = isinstance(event, Finished)
        if taken and not self._is_finished:
            self._ring()
        return taken

    def _next(self) -> GenerationEvent | None:
        """Go on as a task would, until there is an event or something to wait for."""
        if self._waits_for is not None and not self._waits_for.done():
            return None
        if self._script is None:
            self._script = aiter(self.events())
        step, self._step, self._waits_for = self._step or anext(self._script), None, None
        try:
            self._waits_for = step.send(None)
        except StopIteration as given:
            return given.value
        self._step = step
        self._waits_for._asyncio_future_blocking = False  # type: ignore[attr-defined]
        self._waits_for.add_done_callback(self._ring)
        return None

    def _ring(self, _: object = None) -> None:
        if self._on_news is not None:
            self._on_news()

    def _closed_event(self) -> Finished:
        return Finished(
            finish_reason="abort",
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            queue_s=0.0,
            ttft_s=None,
            duration_s=0.5,
        )

    async def aclose(self) -> None:
        self._is_closed = True
        if self._step is not None:
            with contextlib.suppress(asyncio.CancelledError):
                self._step.throw(asyncio.CancelledError())
            self._step = self._waits_for = None
        self._ring()
