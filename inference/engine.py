"""The engine: one thread that owns scheduler, block pool and runner, and serves all requests.

Threads: everything that starts with an underscore runs on the engine thread. Other threads hand in
requests, aborts and settings through the inbox, read streams, and look at immutable pictures. The
runner is loaded on the engine thread too, since a thread pool belongs to the thread that made it.

Invariant: every request that `add_request` accepted gets exactly one final update, whatever fails.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from inference.config import EngineConfig
from inference.engine_checks import check_request
from inference.engine_parts import (
    CUT_OFF,
    DEAD,
    LOADING,
    STEP_FAILED,
    STOPPED,
    STOPPING,
    Ending,
    close_runner,
    make_scheduler,
    named,
)
from inference.errors import (
    EngineDead,
    EngineStopping,
    InferenceError,
    ModelLoadError,
    RequestRejected,
)
from inference.events import EventRing
from inference.inbox import Abort, Add, Command, Drain, Inbox, Tune
from inference.outputs import (
    BlockMap,
    EngineEvent,
    EngineStats,
    Runner,
    RunnerInfo,
    SchedulerOutput,
)
from inference.publisher import Publisher
from inference.queue_positions import QueuePositions
from inference.reporter import Reporter
from inference.request import FinishReason, Request
from inference.scheduler import Scheduler
from inference.scheduling.settings import SchedulerSettings, check_changes, shown_value
from inference.streams import RequestStream, StreamBook

logger = logging.getLogger(__name__)

# Failed steps in a row after which the engine gives up.
_MAX_FAILURES = 3
# The thread looks around this often when nothing happens, so that its pictures stay true.
_HEARTBEAT_S = 1.0
# How long `shutdown` waits, past its grace time, for a step that hangs.
_HANG_S = 10.0


class Engine:
    """`start`, `wait_ready`, then `add_request` from any thread; `shutdown` at the end.

    Tests drive it without a thread: `load()`, then `step()`.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        clock: Callable[[], float] = time.monotonic,
        events: EventRing | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Nothing is loaded before `start`.

        Args:
            events: where to tell what happens; engines that follow one another share it.
            on_end: called once when the engine has ended, on the thread that ends it.

        Raises:
            InvalidConfig: see `EngineConfig.validate`.
        """
        config.validate()
        self._config = config
        self._runner = runner
        self._clock = clock
        self._inbox = Inbox(EngineStopping(LOADING))
        self._streams = StreamBook()
        self._reporter = Reporter(self._inbox, self._streams, clock, events)
        self._publisher = Publisher(clock)
        # It may hang in a step after the engine has ended.
        self.thread: threading.Thread | None = None
        self._is_settled = threading.Event()
        self.ending = Ending(on_end)
        # When the step that is under way began; None between two steps.
        self._step_began_s: float | None = None
        self._failures_in_a_row = 0
        self._cut_off = CUT_OFF
        # Set by shutdown: when the thread leaves at the latest.
        self._stop_at_s: float | None = None
        # Set last by `load`; the others are there when it is.
        self._info: RunnerInfo | None = None
        self._scheduler: Scheduler
        self._positions: QueuePositions
        self._settings: SchedulerSettings

    # ---- any thread

    @property
    def info(self) -> RunnerInfo:
        """Of the loaded model.

        Raises:
            EngineStopping: it is still loading.
        """
        if self._info is None:
            raise EngineStopping(LOADING)
        return self._info

    @property
    def max_len(self) -> int:
        """Most tokens that a prompt and its answer may have together. Raises as `info` does."""
        return min(self.info.max_model_len, self._scheduler.limits.max_len)

    @property
    def step_seconds(self) -> float:
        """How long the step under way has taken so far; 0 between two steps."""
        began_s = self._step_began_s
        return 0.0 if began_s is None else self._clock() - began_s

    def start(self) -> None:
        """Start the engine thread, which loads the model first."""
        assert self.thread is None, "the engine was started before"
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until requests can be served.

        Raises:
            ModelLoadError: the model cannot be served; the message says why.
            EngineDead: the engine has ended.
            TimeoutError: it still loads.
        """
        if not self._is_settled.wait(timeout_s):
            raise TimeoutError(f"The model did not load within {timeout_s:g} seconds.")
        if self.ending.error is not None:
            raise self.ending.error

    def add_request(self, request: Request) -> RequestStream:
        """Check and queue a request; its stream belongs to the calling event loop, if any.

        Raises:
            RequestRejected: one of its kinds (PromptTooLong, InvalidPrompt, InvalidSamplingParams,
                QueueFull, EngineStopping); nothing was queued.
            EngineDead: the engine has ended.
        """
        self.ending.raise_if_set()
        stream = RequestStream(request.request_id, self.abort)
        if request.arrival_s == 0.0:
            request.arrival_s = self._clock()
        try:
            check_request(request, self.info, self._scheduler.limits.max_len)
            self._inbox.add(request, stream, self._settings, self._reporter.seconds_per_start)
        except RequestRejected as rejection:
            self._reporter.on_rejected(request, rejection)
            raise
        return stream

    def abort(
        self,
        request_id: str,
        finish_reason: FinishReason = FinishReason.ABORT,
        detail: str | None = None,
    ) -> bool:
        """End a request in any state at the next step boundary; False if it is not alive.

        With another reason it counts as that: the generator ends with STOP at a stop string.
        """
        return self._inbox.put_abort(Abort(request_id, finish_reason, detail))

    def live_labels(self) -> Sequence[Mapping[str, str]]:
        """Labels of every request that was accepted and has not ended, at this very moment."""
        return self._inbox.live_labels()

    def tune(self, **changes: Any) -> None:
        """Change live settings (fields of `SchedulerSettings`) at the next step boundary.

        Raises:
            InvalidConfig: names the setting, what it got and what is allowed; nothing is changed.
        """
        check_changes(changes)
        self._inbox.put(Tune(changes))

    def stats(self) -> EngineStats:
        """The newest picture, at most a tenth of a second old while the engine works."""
        return self._publisher.stats

    def block_map(self) -> BlockMap:
        """The newest map of all blocks; asking keeps it fresh for the next two seconds."""
        if self._publisher.ask_for_map():
            self._inbox.wake.set()
        return self._publisher.map

    def events_since(self, event_id: int) -> list[EngineEvent]:
        """Events after this id, oldest first; 0 gives all that are kept."""
        return self._reporter.events.since(event_id)

    def drain(self, why: str = STOPPING) -> None:
        """Take no new requests; what runs goes on, what has not started ends with an error.

        Args:
            why: what those read who are refused or had not started.
        """
        self._inbox.shut(EngineStopping(why))
        self._publisher.set_state("draining")
        self._inbox.put(Drain(why))

    def abandon(self, cause: str) -> None:
        """Give up, from another thread, an engine whose own hangs: every stream ends now.

        Its memory comes back when the step, which nobody can end, returns.
        """
        self._die(EngineDead(DEAD), cause)

    def shutdown(self, grace_s: float, *, why: str = STOPPING, cut_off: str = CUT_OFF) -> None:
        """Drain, end what still runs after `grace_s`, give the memory back. Idempotent.

        Returns when the thread has ended; with a log entry if it hangs in a step. `why` is as for
        `drain`; `cut_off` is what those read whose answers did not end in time.
        """
        self.drain(why)
        self._cut_off = cut_off
        stop_at_s = self._clock() + grace_s  # the shortest grace that anybody gave counts
        self._stop_at_s = min(stop_at_s, self._stop_at_s or stop_at_s)
        if self.thread is None:
            self._leave()
            return
        self._inbox.wake.set()
        self.thread.join(grace_s + _HANG_S)
        if self.thread.is_alive():
            logger.error("the engine thread hangs in a step; its requests are ended without it")
            self._die(EngineDead(self._cut_off), "a step did not end when the server stopped")

    # ---- engine thread

    def load(self) -> None:
        """Load the model and open the door. On the thread that will step.

        Raises:
            ModelLoadError: as the runner raised it.
        """
        info, config = self._runner.load(self._publisher.on_load_progress), self._config
        self._settings = SchedulerSettings.from_config(config, info.default_max_num_batched_tokens)
        self._scheduler = make_scheduler(config, info, self._runner, self._settings, id(self))
        self._positions = QueuePositions(self._scheduler)
        self._publisher.attach(self._scheduler, self._reporter.metrics, info)
        self._publisher.publish(did_step=False, did_change=True)
        self._info = info
        self._inbox.open()
        self._is_settled.set()

    def step(self) -> bool:
        """Take in what was handed over, plan, compute, deliver. False when nothing could run."""
        self._step_began_s = self._clock()
        try:
            return self._step(self._step_began_s)
        finally:
            self._step_began_s = None

    def _step(self, start_s: float) -> bool:
        commands = list(self._inbox.take())
        for command in commands:
            self._obey(command, start_s)
        output = self._scheduler.schedule(start_s)
        if output is not None:
            self._compute(output, start_s)
        if self.ending.error is not None:
            return False
        self._report_and_deliver()
        did_step = output is not None
        # An abort moves blocks without a step.
        self._publisher.publish(did_step=did_step, did_change=did_step or bool(commands))
        return did_step

    def _run(self) -> None:
        """The thread's edge: whatever is raised below, no stream is left open."""
        try:
            self.load()
            while not self._must_leave():
                if not self.step() and self.ending.error is None:
                    self._inbox.wake.wait(_HEARTBEAT_S)
                    self._inbox.wake.clear()
            self._leave()
        except ModelLoadError as error:
            logger.error("the model cannot be loaded: %s", error)
            self._die(error, str(error))
        except Exception as error:
            if self.ending.error is None:
                logger.exception("the engine thread failed")
            self._die(EngineDead(DEAD), f"the engine failed: {named(error)}")
        finally:
            # Given up by another thread, this one may have taken requests in after that.
            self._end_streams()
            close_runner(self._runner)

    def _must_leave(self) -> bool:
        if self.ending.error is not None or self._stop_at_s is None:
            return self.ending.error is not None
        return not self._scheduler.has_unfinished() or self._clock() >= self._stop_at_s

    def _obey(self, command: Command, now_s: float) -> None:
        match command:
            case Add(request, stream):
                self._streams.add(stream)
                self._scheduler.add(request, now_s)
                self._positions.on_added(request)
            case Abort(request_id, reason, detail):
                self._scheduler.finish(request_id, reason, detail, now_s)
            case Tune(changes):
                self._settings = replace(self._settings, **changes)
                self._scheduler.apply(self._settings, now_s)
                self._publisher.expire()
                shown = {name: shown_value(value) for name, value in changes.items()}
                self._reporter.events.add("tuned", None, **shown)
            case Drain(why):
                for request in self._scheduler.unfinished():
                    if request.first_scheduled_s is None:
                        self._scheduler.finish(request.request_id, FinishReason.ERROR, why, now_s)

    def _compute(self, output: SchedulerOutput, start_s: float) -> None:
        try:
            step_output = self._runner.execute(output)
        except Exception as error:
            if self.ending.error is None:
                self._fail_step(output, error)
            return
        if self.ending.error is not None:
            # Given up while the step ran: its requests have ended.
            return
        self._failures_in_a_row = 0
        now_s = self._clock()
        progress = self._scheduler.update_from_output(output, step_output, now_s)
        num_sampled = self._reporter.on_progress(progress, now_s)
        self._reporter.metrics.on_step(output, step_output, num_sampled, start_s, self._clock())

    def _fail_step(self, output: SchedulerOutput, error: Exception) -> None:
        """End the requests of this step; the third failure in a row ends the engine."""
        logger.error("step %d failed", output.step_id, exc_info=error)
        self._failures_in_a_row += 1
        self._reporter.on_step_failed(output, error)
        self._scheduler.fail_step(output, STEP_FAILED, self._clock())
        if self._failures_in_a_row >= _MAX_FAILURES:
            self._report_and_deliver()
            cause = f"{_MAX_FAILURES} steps in a row failed, the last with {named(error)}"
            self._die(EngineDead(DEAD), cause)

    def _report_and_deliver(self) -> None:
        self._reporter.report(self._scheduler, self._positions, self._clock())
        for request_id in self._streams.deliver():
            # Its event loop is gone, so nobody can read it.
            self.abort(request_id)

    def _leave(self) -> None:
        """The orderly end: what is left is cut off, counted and told."""
        if self.ending.error is None and self._info is not None:
            for request in self._scheduler.unfinished():
                self._scheduler.finish(
                    request.request_id, FinishReason.ERROR, self._cut_off, self._clock()
                )
            self._report_and_deliver()
        self._die(EngineDead(STOPPED), STOPPED)
        if self.thread is None:
            close_runner(self._runner)

    def _die(self, error: InferenceError, cause: str) -> None:
        """The end of the engine. Uses nothing that may be what failed."""
        if not self.ending.set(error, cause):
            return
        self._inbox.shut(EngineDead(str(error)))
        self._end_streams()
        self._publisher.on_dead(cause)
        self._is_settled.set()
        self.ending.tell()

    def _end_streams(self) -> None:
        """End every stream, of requests that were not taken in as well. Twice is nothing."""
        for command in self._inbox.take():
            if isinstance(command, Add):
                self._streams.add(command.stream)
        self._streams.end_all(FinishReason.ERROR, str(self.ending.error))
        self._inbox.forget_all()
