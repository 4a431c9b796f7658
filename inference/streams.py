"""Hand-over of tokens from the engine thread to a consumer: one slot a request, merged. No torch.

The engine adds to a stream's slot; the consumer takes the slot whole. A consumer that reads slowly
finds more in it, never a longer queue, and nobody else waits for it. A slot's content is bounded
by the request's own `max_tokens`. One wake-up a step and event loop, however many streams moved.

Threads: the engine thread writes, one consumer reads, a lock per stream lies between.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Self

from inference.outputs import StreamUpdate, TokenLogprobs
from inference.request import FinishReason


class RequestStream:
    """Updates of one request: `async for update in stream`, or `get()` where there is no loop.

    Who reads several streams, or must look up in time, sets `on_news` and calls `take`.

    The last update has `finish_reason` set. Closing it before then aborts the request.
    """

    def __init__(self, request_id: str, on_close: Callable[[str], object]) -> None:
        """Belongs to the event loop it is made on, if there is one.

        Args:
            on_close: called with the id, from the consumer's thread, when it leaves early.
        """
        self.request_id = request_id
        # Called on the event loop when there may be something to take.
        self.on_news: Callable[[], None] | None = None
        self._on_close = on_close
        self._lock = threading.Lock()
        # For `get`, which blocks; most streams are read by an event loop and never need it.
        self._condition = threading.Condition(self._lock)
        self._num_blocked = 0
        # The slot: what came since the consumer last took it.
        self._has_news = False
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._position: int | None = None
        self._estimated_wait_s: float | None = None
        self._num_computed = 0
        self._num_cached = 0
        self._end: tuple[FinishReason, str | None] | None = None
        self._is_end_taken = False
        self._is_closed = False
        # A wake-up is under way, so that a stalled loop collects one of them and not one a step.
        self._is_woken = False
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        # What the one reader waits in; a bare future, since an Event costs a token twice as much.
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_ended(self) -> bool:
        """Whether the final update is in the slot or was taken."""
        return self._end is not None

    # ---- engine side: add, then `deliver_batch` once for all streams of a step

    def add_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        with self._lock:
            if self._accepts():
                self._token_ids.append(token_id)
                # One that was preempted may go on with a token at once.
                self._position = self._estimated_wait_s = None
                if logprobs is not None:
                    self._logprobs.append(logprobs)

    def add_progress(self, num_computed_prompt_tokens: int, num_cached_tokens: int) -> None:
        with self._lock:
            if self._accepts():
                self._num_computed = num_computed_prompt_tokens
                self._num_cached = num_cached_tokens
                self._position = self._estimated_wait_s = None

    def add_queue_position(self, position: int, estimated_wait_s: float | None) -> None:
        with self._lock:
            if self._accepts():
                self._position = position
                self._estimated_wait_s = estimated_wait_s

    def end(self, reason: FinishReason, detail: str | None) -> None:
        """Set the end, after which nothing is added. Only the first call counts. Any thread."""
        with self._lock:
            if self._accepts():
                self._end = (reason, detail)
                self._position = self._estimated_wait_s = None

    def _accepts(self) -> bool:
        if self._end is not None or self._is_closed:
            return False
        self._has_news = True
        return True

    # ---- consumer side

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamUpdate:
        while True:
            update = self.take()
            if update is not None:
                return update
            # Not whether it ended: that may have come since, and its update is still to be read.
            if self._is_closed or self._is_end_taken:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def get(self, timeout: float | None = None) -> StreamUpdate | None:
        """Wait for the next update, blocking; None after the last.

        Raises:
            TimeoutError: nothing came within `timeout` seconds.
        """

        def is_settled() -> bool:
            return self._has_news or self._is_closed or self._end is not None

        with self._lock:
            self._num_blocked += 1
            try:
                is_in_time = self._condition.wait_for(is_settled, timeout)
            finally:
                self._num_blocked -= 1
            if not is_in_time:
                raise TimeoutError(f"{self.request_id}: no update within {timeout} seconds.")
        return self.take()

    def close(self) -> None:
        """Leave: a request that has not ended is aborted. Idempotent; the consumer's thread."""
        with self._lock:
            must_abort = not self._is_closed and self._end is None
            self._is_closed = True
            self._has_news = False
            self._token_ids, self._logprobs = [], []
            self._condition.notify_all()
        self._wake_reader()
        if must_abort:
            self._on_close(self.request_id)

    async def aclose(self) -> None:
        self.close()

    def take(self) -> StreamUpdate | None:
        """What came since the last look, as one update; None when nothing did."""
        with self._lock:
            if not self._has_news:
                return None
            self._has_news = False
            update = StreamUpdate(
                token_ids=self._token_ids,
                logprobs=self._logprobs,
                queue_position=self._position,
                estimated_wait_s=self._estimated_wait_s,
                num_computed_prompt_tokens=self._num_computed,
                num_cached_tokens=self._num_cached,
            )
            if self._end is not None:
                self._is_end_taken = True
                update.finish_reason, update.finish_detail = self._end
            self._token_ids, self._logprobs = [], []
            return update

    # ---- waking

    def _wants_wake(self) -> asyncio.AbstractEventLoop | None:
        """Wake a blocked `get`; the loop to wake as well, unless that is under way."""
        with self._lock:
            if self._num_blocked:
                self._condition.notify_all()
            if self._loop is None or self._is_closed:
                return None
            # A loop that closed with a wake-up under way never runs it: try, and be told.
            if self._is_woken and not self._loop.is_closed():
                return None
            self._is_woken = True
            return self._loop

    def _on_loop_woken(self) -> None:
        with self._lock:
            self._is_woken = False
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self.on_news is not None:
            self.on_news()


def deliver_batch(streams: Iterable[RequestStream]) -> list[RequestStream]:
    """Wake the consumers of all streams that got something: one call a loop.

    Returns:
        Streams whose event loop is closed; nobody can read them any more.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[RequestStream]] = {}
    for stream in streams:
        loop = stream._wants_wake()
        if loop is not None:
            by_loop.setdefault(loop, []).append(stream)
    orphans = []
    for loop, woken in by_loop.items():
        try:
            loop.call_soon_threadsafe(_wake_all, woken)
        except RuntimeError:
            orphans += woken
    return orphans


def _wake_all(streams: list[RequestStream]) -> None:
    for stream in streams:
        stream._on_loop_woken()


class StreamBook:
    """Every live stream by request id, and which of them got something since the last delivery.

    Owner: the engine thread. After a hang of that thread `end_all` may come from another one; what
    the engine thread adds after it needs another `end_all`, of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[str, RequestStream] = {}
        self._touched: dict[str, RequestStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: RequestStream) -> None:
        with self._lock:
            self._streams[stream.request_id] = stream

    def touch(self, request_id: str) -> RequestStream:
        """The stream, to add something to; it is delivered next."""
        stream = self._touched[request_id] = self._streams[request_id]
        return stream

    def end(self, request_id: str, reason: FinishReason, detail: str | None) -> None:
        stream = self._touched[request_id] = self._streams.pop(request_id)
        stream.end(reason, detail)

    def deliver(self) -> list[str]:
        """Wake the consumers of all touched streams; returns ids that nobody can read any more."""
        touched, self._touched = self._touched, {}
        orphans = deliver_batch(touched.values())
        return [stream.request_id for stream in orphans]

    def end_all(self, reason: FinishReason, detail: str) -> None:
        with self._lock:
            streams = [*self._touched.values(), *self._streams.values()]
            self._streams, self._touched = {}, {}
        for stream in streams:
            stream.end(reason, detail)
        deliver_batch(streams)
