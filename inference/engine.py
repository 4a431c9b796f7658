"""The engine: one thread that owns scheduler, block pool and runner, and serves all requests.

Threads: everything that starts with an underscore runs on the engine thread. Other threads hand in
requests, aborts and settings through the inbox, read streams, and look at immutable pictures. The
runner is loaded on the engine thread too, since a thread pool belongs to the thread that made it.

Invariant: every request that `add_request` accepted gets exactly one final update, whatever fails.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from inference.config import EngineConfig
from inference.engine_checks import check_request
from inference.errors import (
    EngineDead,
    EngineStopping,
    InferenceError,
    ModelLoadError,
    RequestRejected,
)
from inference.inbox import Abort, Add, Command, Drain, Inbox, Tune
from inference.kv_cache.manager import KVCacheManager
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
from inference.scheduling.settings import SchedulerSettings, check_changes
from inference.streams import RequestStream, StreamBook

logger = logging.getLogger(__name__)

# Failed steps in a row after which the engine gives up.
_MAX_FAILURES = 3
# The thread looks around this often when nothing happens, so that its pictures stay true.
_HEARTBEAT_S = 1.0
# How long `shutdown` waits, past its grace time, for a step that hangs.
_HANG_S = 10.0

_LOADING = "The model is still loading. Try again in a moment."
_STOPPING = "The server is stopping. Try again in a moment."
_CUT_OFF = "The server stopped before the answer was complete."
_STEP_FAILED = "The model failed while computing this answer. Try again."
_STOPPED = "The server has stopped."
_DEAD = "The engine has stopped working. The administrator has to restart it."


class Engine:
    """`start`, `wait_ready`, then `add_request` from any thread; `shutdown` at the end.

    Tests drive it without a thread: `load()`, then `step()`.
    """

    def __init__(
        self, config: EngineConfig, runner: Runner, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises InvalidConfig. Nothing is loaded before `start`."""
        config.validate()
        self._config = config
        self._runner = runner
        self._clock = clock
        self._inbox = Inbox(EngineStopping(_LOADING))
        self._streams = StreamBook()
        self._reporter = Reporter(self._inbox, self._streams, clock)
        self._publisher = Publisher(clock)
        self._thread: threading.Thread | None = None
        self._is_settled = threading.Event()
        # Why the engine ended; None while it lives.
        self._fatal: InferenceError | None = None
        self._failures_in_a_row = 0
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
            raise EngineStopping(_LOADING)
        return self._info

    @property
    def max_len(self) -> int:
        """Most tokens that a prompt and its answer may have together. Raises as `info` does."""
        return min(self.info.max_model_len, self._scheduler.max_len)

    def start(self) -> None:
        """Start the engine thread, which loads the model first."""
        assert self._thread is None, "the engine was started before"
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until requests can be served.

        Raises:
            ModelLoadError: the model cannot be served; the message says why.
            EngineDead: the engine has ended.
            TimeoutError: it still loads.
        """
        if not self._is_settled.wait(timeout_s):
            raise TimeoutError(f"The model did not load within {timeout_s:g} seconds.")
        if self._fatal is not None:
            raise self._fatal

    def add_request(self, request: Request) -> RequestStream:
        """Check and queue a request; its stream belongs to the calling event loop, if any.

        Raises:
            RequestRejected: one of its kinds (PromptTooLong, InvalidPrompt, InvalidSamplingParams,
                QueueFull, EngineStopping); nothing was queued.
            EngineDead: the engine has ended.
        """
        if self._fatal is not None:
            raise EngineDead(str(self._fatal))
        stream = RequestStream(request.request_id, self.abort)
        if request.arrival_s == 0.0:
            request.arrival_s = self._clock()
        try:
            check_request(request, self.info, self._scheduler.max_len)
            per_start_s = self._reporter.seconds_per_start
            self._inbox.add(request, stream, self._settings, per_start_s)
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
        is_live = self._inbox.is_live(request_id)
        if is_live:
            self._inbox.put(Abort(request_id, finish_reason, detail))
        return is_live

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

    def drain(self) -> None:
        """Take no new requests; what runs goes on, what has not started ends with an error."""
        self._inbox.shut(EngineStopping(_STOPPING))
        self._publisher.set_state("draining")
        self._inbox.put(Drain())

    def shutdown(self, grace_s: float) -> None:
        """Drain, end what still runs after `grace_s`, give the memory back. Idempotent.

        Returns when the thread has ended; with a log entry if it hangs in a step.
        """
        self.drain()
        if self._stop_at_s is None:
            self._stop_at_s = self._clock() + grace_s
        if self._thread is None:
            self._leave()
            return
        self._inbox.wake.set()
        self._thread.join(grace_s + _HANG_S)
        if self._thread.is_alive():
            logger.error("the engine thread hangs in a step; its requests are ended without it")
            self._streams.end_all(FinishReason.ERROR, _CUT_OFF)

    # ---- engine thread

    def load(self) -> None:
        """Load the model and open the door. On the thread that will step.

        Raises:
            ModelLoadError: as the runner raised it.
        """
        info, config = self._runner.load(self._publisher.on_load_progress), self._config
        self._settings = SchedulerSettings.from_config(config, info.default_max_num_batched_tokens)
        kv = KVCacheManager(
            info.num_blocks,
            info.block_size,
            # The cache lives and dies with the loaded weights; this keeps digests apart as well.
            model_version=f"{info.model_name}:{id(self)}",
            enable_prefix_cache=config.enable_prefix_cache,
        )
        self._scheduler = Scheduler(
            self._settings,
            kv,
            max_len=min(config.max_model_len or info.max_model_len, info.max_model_len),
            eos_token_ids=info.eos_token_ids,
        )
        self._positions = QueuePositions(self._scheduler)
        self._publisher.attach(self._scheduler, self._reporter.metrics, info)
        self._publisher.publish(did_step=False, did_change=True)
        self._info = info
        self._inbox.open()
        self._is_settled.set()

    def step(self) -> bool:
        """Take in what was handed over, plan, compute, deliver. False when nothing could run."""
        start_s = self._clock()
        commands = list(self._inbox.take())
        for command in commands:
            self._obey(command, start_s)
        output = self._scheduler.schedule(start_s)
        if output is not None:
            self._compute(output, start_s)
        if self._fatal is not None:
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
                if not self.step() and self._fatal is None:
                    self._inbox.wake.wait(_HEARTBEAT_S)
                    self._inbox.wake.clear()
            self._leave()
        except ModelLoadError as error:
            logger.error("the model cannot be loaded: %s", error)
            self._die(error)
        except Exception:
            logger.exception("the engine thread failed")
            self._die(EngineDead(_DEAD))

    def _must_leave(self) -> bool:
        if self._fatal is not None:
            return True
        if self._stop_at_s is None:
            return False
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
                shown = {name: str(value) for name, value in changes.items()}
                self._reporter.events.add("tuned", None, **shown)
            case Drain():
                for request in self._scheduler.unfinished():
                    if request.first_scheduled_s is None:
                        self._scheduler.finish(
                            request.request_id, FinishReason.ERROR, _STOPPING, now_s
                        )

    def _compute(self, output: SchedulerOutput, start_s: float) -> None:
        try:
            step_output = self._runner.execute(output)
        except Exception as error:
            self._fail_step(output, error)
            return
        self._failures_in_a_row = 0
        now_s = self._clock()
        progress = self._scheduler.update_from_output(output, step_output, now_s)
        num_sampled = self._reporter.on_progress(progress, now_s)
        end_s, forward_s = self._clock(), step_output.forward_s
        self._reporter.metrics.on_step(output, num_sampled, start_s, end_s, forward_s)

    def _fail_step(self, output: SchedulerOutput, error: Exception) -> None:
        """End the requests of this step; the third failure in a row ends the engine."""
        logger.error("step %d failed", output.step_id, exc_info=error)
        self._failures_in_a_row += 1
        self._reporter.on_step_failed(output, error)
        now_s = self._clock()
        for part in output.scheduled:
            self._scheduler.finish(part.request.request_id, FinishReason.ERROR, _STEP_FAILED, now_s)
        if self._failures_in_a_row >= _MAX_FAILURES:
            self._report_and_deliver()
            self._die(EngineDead(_DEAD))

    def _report_and_deliver(self) -> None:
        self._reporter.report(self._scheduler, self._positions, self._clock())
        for request_id in self._streams.deliver():
            # Its event loop is gone, so nobody can read it.
            self.abort(request_id)

    def _leave(self) -> None:
        """The orderly end: what is left is cut off, counted and told."""
        if self._fatal is None and self._info is not None:
            for request in self._scheduler.unfinished():
                self._scheduler.finish(
                    request.request_id, FinishReason.ERROR, _CUT_OFF, self._clock()
                )
            self._report_and_deliver()
        self._die(EngineDead(_STOPPED))

    def _die(self, error: InferenceError) -> None:
        """The end of the engine. Uses nothing that may be what failed."""
        if self._fatal is not None:
            return
        self._fatal = error
        self._inbox.shut(EngineDead(str(error)))
        for command in self._inbox.take():
            if isinstance(command, Add):
                self._streams.add(command.stream)
        self._streams.end_all(FinishReason.ERROR, str(error))
        self._publisher.on_dead(str(error))
        try:
            self._runner.close()
        except Exception:
            logger.exception("the runner could not give its memory back")
        self._is_settled.set()
