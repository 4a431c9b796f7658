"""Passes on what happened: to the door, the streams, the figures and the events. No torch.

Owner: the engine thread, but for `on_rejected`.
"""

from collections.abc import Callable

from inference.errors import RequestRejected
from inference.events import EventRing
from inference.inbox import Inbox
from inference.metrics import Metrics
from inference.outputs import SchedulerOutput, TokenOutput
from inference.queue_positions import QueuePositions
from inference.request import FinishReason, Request
from inference.scheduler import Scheduler
from inference.scheduling.running import Preemption
from inference.streams import StreamBook

# Events that could come by the hundred are told at most this often, with their number.
_REPEATED_EVERY_S = 1.0
_KINDS = {
    FinishReason.ABORT: "aborted",
    FinishReason.ERROR: "failed",
    FinishReason.REFUSED: "failed",
}


class Reporter:
    def __init__(
        self,
        inbox: Inbox,
        streams: StreamBook,
        clock: Callable[[], float],
        events: EventRing | None = None,
    ) -> None:
        self.metrics = Metrics()
        self.events = EventRing() if events is None else events
        # How often a waiting request starts when all slots are taken; None without a basis.
        self.seconds_per_start: float | None = None
        self._inbox = inbox
        self._streams = streams
        self._clock = clock
        self._eviction_event_s = float("-inf")
        self._rejection_event_s = float("-inf")

    def on_rejected(self, request: Request, rejection: RequestRejected) -> None:
        """Any thread."""
        num_rejected = self._inbox.count_rejected()
        now_s = self._clock()
        if now_s - self._rejection_event_s >= _REPEATED_EVERY_S:
            self._rejection_event_s = now_s
            why = type(rejection).__name__
            self.events.add("rejected", request, why=why, num_rejected=num_rejected)

    def on_progress(self, progress: list[tuple[Request, TokenOutput | None]], now_s: float) -> int:
        """Put a step's tokens into the streams; returns how many there are."""
        num_sampled = 0
        for request, token in progress:
            stream = self._streams.touch(request.request_id)
            if token is None or len(request.output_token_ids) == 1:
                num_computed = min(request.num_computed_tokens, request.num_prompt_tokens)
                stream.add_progress(num_computed, request.num_cached_tokens)
            if token is not None:
                num_sampled += 1
                stream.add_token(token.token_id, token.logprobs)
                self.metrics.on_token(request, now_s)
        return num_sampled

    def on_step_failed(self, output: SchedulerOutput, error: Exception) -> None:
        self.metrics.totals["step_failures"] += 1
        text = f"{type(error).__name__}: {error}"[:500]
        self.events.add("failed", None, error=text, num_requests=len(output.scheduled))

    def report(self, scheduler: Scheduler, positions: QueuePositions, now_s: float) -> None:
        """After each step: everything that started, was preempted, ended, or moved up."""
        news = scheduler.take_news()
        # Requests that start and end within one step are in no slot any more: -1.
        slots = {run.request: run.slot for run in scheduler.running} if news.started else {}
        for request in news.started:
            self._inbox.on_started(request)
            positions.on_gone(request)
            self.metrics.on_started(request, now_s)
            self.events.add(
                "admitted",
                request,
                queue_s=now_s - request.arrival_s,
                slot=slots.get(request, -1),
                cached_tokens=request.num_cached_tokens,
            )
        for preemption in news.preempted:
            positions.on_gone(preemption.request)
            self._preempted(preemption)
        for request in news.ended:
            positions.on_gone(request)
            self._ended(request)
        if news.ended:
            num_slots = len(scheduler.running) + len(news.ended)
            self.seconds_per_start = self.metrics.seconds_per_start(num_slots)
        for request, position in positions.changes(now_s):
            per_start_s = self.seconds_per_start
            wait_s = None if per_start_s is None else (position + 1) * per_start_s
            self._streams.touch(request.request_id).add_queue_position(position, wait_s)
        self._evicted(scheduler.kv.pool.num_evicted, now_s)
        self.metrics.totals["requests_rejected"] = self._inbox.num_rejected

    def _preempted(self, preemption: Preemption) -> None:
        self.metrics.totals["preemptions"] += 1
        self.metrics.totals["recomputed_tokens"] += preemption.num_tokens_lost
        self.events.add(
            "preempted",
            preemption.request,
            tokens_lost=preemption.num_tokens_lost,
            blocks=preemption.num_blocks,
            # What an admin would set so that it does not happen.
            setting=preemption.setting,
            value=preemption.value,
        )

    def _ended(self, request: Request) -> None:
        assert request.finish_reason is not None, f"{request.request_id} ended without a reason"
        self._inbox.on_ended(request)
        self.metrics.on_ended(request)
        self.events.add(
            _KINDS.get(request.finish_reason, "finished"),
            request,
            reason=request.finish_reason.value,
            detail=request.finish_detail or "",
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=len(request.output_token_ids),
            seconds=(request.finished_s or 0.0) - request.arrival_s,
        )
        self._streams.end(request.request_id, request.finish_reason, request.finish_detail)

    def _evicted(self, num_evicted: int, now_s: float) -> None:
        totals = self.metrics.totals
        num_new = num_evicted - totals["blocks_evicted"]
        if num_new and now_s - self._eviction_event_s >= _REPEATED_EVERY_S:
            self._eviction_event_s = now_s
            self.events.add("evicted", None, blocks=num_new)
            totals["blocks_evicted"] = num_evicted
