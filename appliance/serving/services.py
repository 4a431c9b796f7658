"""A metered generation: prepared, paid for from the quota, run by the back end, booked at its end.

`generation_open` is the one way in for chat, API and capacity test. Whatever happens to a
`Generation` (finished, failed, closed, its task cancelled, never looked at), the tokens held for
it are settled exactly once with what it really took. All of it runs on the event loop; database
work runs in threads.
"""

import asyncio
import contextlib
import logging
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from appliance.errors import ContextLengthExceeded
from appliance.quotas.rules import Limit, limits_of
from appliance.quotas.services import (
    LEAST_ANSWER_TOKENS,
    Reservation,
    Usage,
    quota_release,
    quota_reserve,
    quota_settle,
)
from appliance.serving.backend import Backend, Prepared, TokenStream
from appliance.serving.booking import (
    STORAGE_FAULTS,
    book,
    in_db_thread,
    keep,
    storage_unavailable,
)
from appliance.serving.gateway import get_admitting_backend
from appliance.serving.live_settings import engine_tune as engine_tune
from appliance.serving.metrics import generation_observe
from appliance.serving.news import News
from appliance.serving.turns import Told, in_turn, turn_check, turns_changed
from appliance.serving.types import (
    Delta,
    Finished,
    GenerationEvent,
    GenerationRequest,
    Reading,
)

logger = logging.getLogger(__name__)

# How long a caller who closes waits for the ledger; the booking itself goes on until it succeeds.
_BOOKING_WAIT_S = 5.0


async def generation_open(request: GenerationRequest, *, told: Told | None = None) -> "Generation":
    """Check, reserve and queue one generation.

    The answer's limit may come out lower than asked for when the caller's quota leaves less; see
    `quota_reserve`. Where a limit's rule says so, it waits here for its turn, and `told` gets the
    place in line. The caller iterates the result and calls `aclose()` in a `finally`.

    Raises:
        BadRequest and its kinds, ModelNotFound: the request cannot be served as it is.
        QuotaExceeded: not enough tokens of the day or month are left.
        RateLimited: the limit of a minute, or of requests at a time, is reached.
        QueueIsFull, EngineUnavailable: try again later.
    """
    opening = _Opening(request, told)
    # A caller who leaves must not cut a reservation off from the code that gives it back.
    task = asyncio.ensure_future(opening.run())
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        opening.is_wanted = False
        task.add_done_callback(_close_unwanted)
        raise


class _NotWantedError(Exception):
    """The caller left before the request was queued."""


class _Opening:
    def __init__(self, request: GenerationRequest, told: Told | None) -> None:
        self.request = request
        self.told = told
        self.is_wanted = True

    async def run(self) -> "Generation":
        request = self.request
        backend = get_admitting_backend()
        prepared = await backend.prepare(request)
        self._check_wanted()
        try:
            return await in_turn(
                request.caller,
                lambda: self._admit(backend, prepared),
                still_wanted=self._check_wanted,
                told=self.told,
            )
        except STORAGE_FAULTS as exc:
            raise storage_unavailable(exc) from exc

    async def _admit(self, backend: Backend, prepared: Prepared) -> "Generation":
        """Hold the tokens and queue it, or raise which limit is in the way."""
        request, caller = self.request, self.request.caller
        limits = await in_db_thread(limits_of, caller.user_id, caller.key_id)
        least_tokens = max(LEAST_ANSWER_TOKENS, request.options.min_tokens or 0)
        completion_tokens = _within_context(prepared, limits, least_tokens)
        # Asked twice: here so that those in line do not write to the database in vain.
        turn_check(caller, limits, get_admitting_backend())
        reservation = await in_db_thread(
            quota_reserve,
            caller.user_id,
            key_id=caller.key_id,
            prompt_tokens=prepared.prompt_tokens,
            completion_tokens=completion_tokens,
            least_completion_tokens=least_tokens,
            limits=limits,
            key_prefix=caller.key_prefix or "",
            source=caller.source,
            model=_model_name(backend),
        )
        try:
            self._check_wanted()
            if reservation.completion_tokens < prepared.max_completion_tokens:
                prepared = await _prepare_cut(backend, request, reservation.completion_tokens)
            # Asked again: the server may have begun to stop meanwhile.
            admitting = get_admitting_backend()
            turn_check(caller, limits, admitting)
            stream = await admitting.generate(prepared)
        except BaseException:
            book(quota_release, reservation)
            raise
        return Generation(request, prepared, stream, reservation, _model_name(backend))

    def _check_wanted(self) -> None:
        if not self.is_wanted:
            raise _NotWantedError


def _within_context(prepared: Prepared, limits: Sequence[Limit], least_tokens: int) -> int:
    """The most tokens of the answer that rules on the length of a request allow."""
    most = prepared.max_completion_tokens
    for limit in limits:
        if limit.name != "context_tokens":
            continue
        room = limit.value - prepared.prompt_tokens
        if room < min(least_tokens, most):
            raise ContextLengthExceeded(
                f"The prompt has {prepared.prompt_tokens:,} tokens; the limit is {limit.words}, "
                "the answer included. Shorten the conversation or start a new one.",
                param="messages",
            )
        most = min(most, room)
    return most


async def _prepare_cut(backend: Backend, request: GenerationRequest, max_tokens: int) -> Prepared:
    options = replace(request.options, max_tokens=max_tokens)
    return await backend.prepare(replace(request, options=options))


def _model_name(backend: Backend) -> str:
    model = backend.model
    return model.name if model is not None else ""


def _close_unwanted(task: "asyncio.Future[Generation]") -> None:
    if task.cancelled():
        return
    exc = task.exception()
    if exc is None:
        task.result().close_soon()
    elif not isinstance(exc, _NotWantedError):
        logger.info("a request whose caller left was refused: %s", exc)


class Generation:
    """One running generation. Iterate it once, or `listen` and `take`; close it always."""

    def __init__(
        self,
        request: GenerationRequest,
        prepared: Prepared,
        stream: TokenStream,
        reservation: Reservation,
        model: str,
    ) -> None:
        self.request_id = stream.request_id
        self.prompt_tokens = prepared.prompt_tokens
        self.max_completion_tokens = prepared.max_completion_tokens
        self._meter = _Meter(request, stream, reservation, model)
        # Also for one that nobody iterates or closes. It runs in whatever thread collects it.
        loop = asyncio.get_running_loop()
        self._finalizer = weakref.finalize(self, _end_from_any_thread, loop, self._meter)
        self._finalizer.atexit = False

    @property
    def cached_tokens(self) -> int:
        return self._meter.stream.cached_tokens

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far; the truth also after an early end."""
        return self._meter.stream.completion_tokens

    def listen(self, news: News) -> None:
        """Ring `news` when there may be something to take. It must not know this object."""
        self._meter.stream.listen(news.ring)

    def take(self) -> Sequence[GenerationEvent]:
        """The events since the last look, without waiting. Raises what broke the back end."""
        events = self._meter.stream.take()
        for event in events:
            self._meter.note(event)
        return events

    async def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        news = News()
        self.listen(news)
        try:
            while True:
                for event in self.take():
                    yield event
                    if isinstance(event, Finished):
                        return
                await news.wait()
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """End it if it still runs, and book it. Safe at any time, twice, and when cancelled."""
        ending = self._meter.end_soon()
        # The booking does not belong to the caller: it goes on when the caller is cancelled.
        await asyncio.wait([ending], timeout=_BOOKING_WAIT_S)

    def close_soon(self) -> None:
        """`aclose()` for places that cannot wait."""
        self._meter.end_soon()

    def withdraw(self) -> None:
        """`close_soon()` for one whose request was refused as a whole.

        It leaves a row in the ledger only if the engine wrote something of it meanwhile.
        """
        self._meter.is_withdrawn = True
        self._meter.end_soon()


def _end_from_any_thread(loop: asyncio.AbstractEventLoop, meter: "_Meter") -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the server
        loop.call_soon_threadsafe(meter.end_soon)


def _observe(usage: Usage) -> None:
    generation_observe(
        source=usage.source,
        end=usage.end,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        queue_s=usage.queue_s,
        ttft_s=usage.ttft_s,
        duration_s=usage.duration_s,
    )


class _Meter:
    """Counts one generation and books it once. Knows no `Generation`, so that one can be freed."""

    def __init__(
        self,
        request: GenerationRequest,
        stream: TokenStream,
        reservation: Reservation,
        model: str,
    ) -> None:
        self.stream = stream
        self.is_withdrawn = False
        self._request = request
        self._reservation = reservation
        self._model = model
        self._opened_s = time.monotonic()
        self._began_s: float | None = None
        self._first_delta_s: float | None = None
        self._finished: Finished | None = None
        self._ending: asyncio.Future[None] | None = None

    def note(self, event: GenerationEvent) -> None:
        now = time.monotonic()
        if isinstance(event, Reading | Delta) and self._began_s is None:
            self._began_s = now
        if isinstance(event, Delta) and self._first_delta_s is None:
            self._first_delta_s = now
        if isinstance(event, Finished):
            self._finished = event
            self.end_soon()

    def end_soon(self) -> "asyncio.Future[None]":
        """Start to close and book, once; the same future every time."""
        if self._ending is None:
            self._ending = keep(asyncio.ensure_future(self._end()))
        return self._ending

    async def _end(self) -> None:
        try:
            await self.stream.aclose()
        finally:
            turns_changed()
            await asyncio.shield(self._book())

    def _book(self) -> "asyncio.Future[None]":
        if self.is_withdrawn and not self._has_begun():
            return book(quota_release, self._reservation)
        usage = self._usage()
        _observe(usage)
        return book(quota_settle, self._reservation, usage)

    def _usage(self) -> Usage:
        caller = self._request.caller
        finished = self._finished or self._cut_off()
        is_read = self._has_begun() or finished.finish_reason in ("stop", "length")
        return Usage(
            request_id=self.stream.request_id,
            username=caller.username,
            source=caller.source,
            model=self._model,
            key_id=caller.key_id,
            key_prefix=caller.key_prefix or "",
            # Whatever ended it in the queue: a prompt that was never read is not charged.
            prompt_tokens=finished.prompt_tokens if is_read else 0,
            cached_tokens=finished.cached_tokens if is_read else 0,
            completion_tokens=finished.completion_tokens,
            queue_s=finished.queue_s,
            ttft_s=finished.ttft_s,
            duration_s=finished.duration_s,
            end=finished.finish_reason,
        )

    def _has_begun(self) -> bool:
        return self._began_s is not None or self.stream.completion_tokens > 0

    def _cut_off(self) -> Finished:
        """What a generation took whose end nobody saw."""
        stream, opened, now = self.stream, self._opened_s, time.monotonic()
        return Finished(
            finish_reason="abort",
            prompt_tokens=stream.prompt_tokens,
            cached_tokens=stream.cached_tokens,
            completion_tokens=stream.completion_tokens,
            queue_s=(self._began_s or now) - opened,
            ttft_s=None if self._first_delta_s is None else self._first_delta_s - opened,
            duration_s=now - opened,
        )
