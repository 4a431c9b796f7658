"""Keeps one engine serving: loads it, rebuilds it when it fails, and changes its model. No torch.

Its thread, "engine-control", does all of that and looks at the engine once a second. Other threads
read attributes that are replaced whole, and ask.

An engine that ended by itself (failed steps, memory, a fault of its own) is loaded again once,
after a pause. When it ends again within `REBUILD_WINDOW_S` it stays dead: what failed twice needs
somebody to look at it, and a server that loads for ever looks alive. An engine that hangs is given
up at once and rebuilt if its step returns; otherwise `is_lost` says that the process has to end,
since nothing can end a native call and its memory stays taken.
"""

import gc
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inference.engine import Engine
from inference.errors import InferenceError, SwapRefused
from inference.events import EventRing
from inference.served_model import MakeRunner, ServedModel, TextHalf, start_engine, wait_served
from inference.watchdog import LOST_S, Watchdog

logger = logging.getLogger(__name__)

Progress = Callable[[float, str], None]
Resolve = Callable[[Progress], Path]

LOOK_EVERY_S = 1.0
BACKOFF_S = 2.0
REBUILD_WINDOW_S = 600.0


@dataclass(frozen=True, slots=True)
class Phase:
    # loading, ready, rebuilding, swapping, hung, dead or stopping
    name: str
    # Share done in [0, 1] and what is being done, while it loads.
    progress: tuple[float, str] = (1.0, "")
    # For administrators: what happened, and what to do.
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Swap:
    """The newest change of the model, under way or ended."""

    model: str
    # checking, draining, loading, rolling_back; done or failed at its end
    stage: str
    # time.time() of its start, for display
    began_at: float
    # Why it failed, and what is served now.
    error: str | None = None

    @property
    def is_over(self) -> bool:
        return self.stage in ("done", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOrder:
    """What a change of the model needs to know."""

    # The name that people know it by.
    model: str
    # Finds and checks the folder before anything is drained; may raise InferenceError.
    resolve: Resolve
    # Time that running answers get.
    drain_s: float
    # Called on the control thread once the model serves.
    on_loaded: Callable[[], None] = lambda: None


class _StopAsked(Exception):
    """The supervisor was asked to stop while it loaded."""


class EngineSupervisor:
    def __init__(
        self,
        make_runner: MakeRunner,
        config: Mapping[str, Any],
        *,
        clock: Callable[[], float] = time.monotonic,
        backoff_s: float = BACKOFF_S,
        look_every_s: float = LOOK_EVERY_S,
        watch: Callable[[Engine, Callable[[], float]], Watchdog] = Watchdog,
    ) -> None:
        """
        Args:
            make_runner: what computes the steps. Tests put their faults here.
            config: fields of EngineConfig other than the model folder.
        """
        self.events = EventRing()
        self.phase = Phase("loading", (0.0, "finding the model"))
        self.swap: Swap | None = None
        # The engine whose figures are shown; it may be loading, draining or dead.
        self.engine: Engine | None = None
        # What takes new requests; None while nothing does.
        self.served: ServedModel | None = None
        # Only the end of the process helps.
        self.is_lost = False
        self._make_runner = make_runner
        self._config = config
        self._clock = clock
        self._backoff_s = backoff_s
        self._look_every_s = look_every_s
        self._watch = watch
        self._watchdog: Watchdog | None = None
        # Live settings chosen so far: each engine begins with them.
        self._changes: dict[str, Any] = {}
        self._model_dir: Path | None = None
        self._rebuilt_s: float | None = None
        self._order: SwapOrder | None = None
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stop_asked = threading.Event()

    # ---- any thread

    def start(self, resolve: Resolve) -> None:
        """Begin to load the model that `resolve` finds; `phase` tells how it goes."""
        threading.Thread(
            target=self._run, args=(resolve,), name="engine-control", daemon=True
        ).start()

    def tune(self, changes: Mapping[str, Any]) -> None:
        """Change live settings, of this engine and of those that follow it.

        Raises:
            InvalidConfig: nothing was changed.
        """
        with self._lock:
            if self.engine is not None:
                self.engine.tune(**changes)
            self._changes.update(changes)

    def ask_swap(self, order: SwapOrder) -> None:
        """Begin to change the model; `swap` tells how it goes.

        Raises:
            SwapRefused: another change is under way, or the engine is not in a state for one.
        """
        with self._lock:
            if self.swap is not None and not self.swap.is_over:
                raise SwapRefused(
                    f"The server is changing to {self.swap.model} already. Wait for its end."
                )
            if self.phase.name not in ("ready", "dead") or self.is_lost:
                raise SwapRefused(
                    f"The model cannot be changed while the engine is {self.phase.name}. "
                    "Try again when it serves."
                )
            self.swap = Swap(order.model, "checking", time.time())
            self._order = order
        self._wake.set()

    def stop(self, grace_s: float) -> None:
        """Take nothing new, let what runs finish for `grace_s`, end the rest. Blocking."""
        with self._lock:
            self._stop_asked.set()
            engine, is_loaded = self.engine, self.phase.name in ("ready", "swapping")
            self.phase = replace(self.phase, name="stopping")
        self._wake.set()
        # One that hangs for good would only be waited for.
        if engine is not None and not self.is_lost:
            engine.shutdown(grace_s if is_loaded else 0.0)

    # ---- the control thread

    def _run(self, resolve: Resolve) -> None:
        try:
            self._load_first(resolve)
            while not self._stop_asked.is_set():
                self._wake.wait(self._look_every_s)
                self._wake.clear()
                self.look()
        except _StopAsked:
            return
        except Exception as error:
            logger.exception("the engine's supervisor failed")
            self._die(f"The server failed while it kept the engine: {_named(error)}.")

    def _load_first(self, resolve: Resolve) -> None:
        def report(share: float, doing: str) -> None:
            self.phase = Phase("loading", (share, doing))

        try:
            model_dir = resolve(report)
            report(0.0, "starting the engine")
            self._load(model_dir)
        except _StopAsked:
            raise
        except Exception as error:
            # An edge: an error that nobody sees would load for ever.
            if not isinstance(error, InferenceError | OSError):
                logger.exception("the model cannot be served")
            self._die(_named(error))

    def look(self) -> None:
        """Do what is due. On the control thread, once a second and whenever something happens."""
        order, self._order = self._order, None
        if order is not None:
            self._change_model(order)
            return
        engine, watchdog = self.engine, self._watchdog
        if engine is None or watchdog is None or self.phase.name not in ("ready", "hung"):
            return
        if watchdog.has_hung():
            self.served = None
            self._set_phase(Phase("hung", error=f"The engine was given up: {engine.ending.cause}."))
            self.events.add("engine_hung", None, cause=engine.ending.cause)
        if watchdog.is_lost:
            self._lose(engine)
        elif not watchdog.is_stuck and engine.ending.error is not None:
            self._recover(engine.ending.cause)

    def _recover(self, cause: str) -> None:
        """Load the same model again, or stay dead."""
        self.served = None
        now_s = self._clock()
        logger.error("the engine ended by itself: %s", cause)
        if self._rebuilt_s is not None and now_s - self._rebuilt_s < REBUILD_WINDOW_S:
            self._die(
                f"The engine failed again {now_s - self._rebuilt_s:.0f} seconds after it was "
                f"rebuilt: {cause}. It is not rebuilt a second time. Look into the log, then load "
                "another model or restart the server."
            )
            return
        self._rebuilt_s = now_s
        self._set_phase(Phase("rebuilding", (0.0, "waiting before the model is loaded again")))
        self.events.add("engine_failed", None, cause=cause)
        if self._stop_asked.wait(self._backoff_s):
            raise _StopAsked
        self._give_back()
        assert self._model_dir is not None, "an engine ended that was never loaded"
        try:
            self._load(self._model_dir)
        except _StopAsked:
            raise
        except Exception as error:
            logger.exception("the engine cannot be rebuilt")
            self._die(
                f"The engine failed ({cause}) and could not be rebuilt: {_named(error)} "
                "Restart the server."
            )
        else:
            # From here on counts: a slow load must not use the window up.
            self._rebuilt_s = self._clock()
            self.events.add("engine_rebuilt", None)

    def _change_model(self, order: SwapOrder) -> None:
        former, former_dir = self.engine, self._model_dir
        try:
            model_dir = order.resolve(lambda share, doing: None)
            text = TextHalf.from_dir(model_dir)
        except Exception as error:
            self._end_swap(error, "Nothing was changed.")
            return
        self._stage("draining")
        self._set_phase(Phase("swapping", (0.0, "letting running answers finish")))
        self.events.add("swap_began", None, model=order.model)
        self.served = None
        if former is not None:
            former.shutdown(
                order.drain_s,
                why=f"The server is changing to the model {order.model}. Try again in a moment.",
                cut_off="The server changed its model before the answer was complete.",
            )
            if former.thread is not None and former.thread.is_alive():
                self._end_swap(None, "The engine hangs in a step and cannot be stopped.")
                self._lose(former)
                return
        self._give_back()
        self._stage("loading")
        try:
            self._load(model_dir, text)
        except _StopAsked:
            raise
        except Exception as error:
            self._roll_back(order, former_dir, error)
            return
        self._rebuilt_s = None
        self._tell_loaded(order)
        self._stage("done")
        self.events.add("swapped", None, model=order.model)

    def _tell_loaded(self, order: SwapOrder) -> None:
        try:
            order.on_loaded()
        except Exception:
            logger.exception("the model %s serves, but not from the next start on", order.model)

    def _roll_back(self, order: SwapOrder, former_dir: Path | None, error: Exception) -> None:
        """Serve the former model again."""
        logger.error("the model %s cannot be served: %s", order.model, error)
        self._stage("rolling_back")
        self._give_back()
        if former_dir is None:
            self._end_swap(error, "No model is served.")
            self._die(f"The model {order.model} cannot be served: {_named(error)}")
            return
        try:
            self._load(former_dir)
        except _StopAsked:
            raise
        except Exception as second:
            logger.exception("the former model cannot be loaded either")
            self._end_swap(error, f"The former model cannot be loaded either: {_named(second)}")
            self._die(f"No model can be loaded: {_named(error)} Then: {_named(second)}")
        else:
            self._end_swap(error, f"{former_dir.name} is served as before.")

    # ---- steps of the above

    def _load(self, model_dir: Path, text: TextHalf | None = None) -> None:
        """Serve `model_dir`; an engine that failed on the way is ended. Blocking."""
        with self._lock:
            if self._stop_asked.is_set():
                raise _StopAsked
            self.engine = start_engine(
                model_dir,
                self._make_runner,
                self._config,
                events=self.events,
                on_end=self._wake.set,
                changes=self._changes,
            )
        try:
            served = wait_served(self.engine, model_dir, text)
        except Exception:
            if self._stop_asked.is_set():
                raise _StopAsked from None
            raise
        # What is loaded stays: a full collection over it would hold up every stream.
        gc.collect()
        gc.freeze()
        with self._lock:
            if self._stop_asked.is_set():
                raise _StopAsked
            self._watchdog = self._watch(served.engine, self._clock)
            self._model_dir, self.served = model_dir, served
            self.phase = Phase("ready")

    def _give_back(self) -> None:
        """Let the former model's memory go before the next one takes its own."""
        self._watchdog = None
        gc.unfreeze()
        gc.collect()

    def _stage(self, stage: str) -> None:
        assert self.swap is not None, "no change of the model is under way"
        self.swap = replace(self.swap, stage=stage)

    def _end_swap(self, error: Exception | None, outcome: str) -> None:
        assert self.swap is not None, "no change of the model is under way"
        why = outcome if error is None else f"{_named(error)} {outcome}"
        self.events.add("swap_failed", None, model=self.swap.model, error=why)
        self.swap = replace(self.swap, stage="failed", error=why)

    def _set_phase(self, phase: Phase) -> None:
        with self._lock:
            if not self._stop_asked.is_set():
                self.phase = phase

    def _lose(self, engine: Engine) -> None:
        self._die(
            f"A step of the engine hangs and has not returned for more than {LOST_S:.0f} seconds "
            "since it was given up. Nothing can end it but the end of this process: restart the "
            "server. The log says where the step is."
        )
        self.is_lost = True

    def _die(self, error: str) -> None:
        self.served = None
        logger.error("the engine is dead: %s", error)
        self.events.add("engine_dead", None, cause=error)
        self._set_phase(Phase("dead", error=error))


def _named(error: Exception) -> str:
    """An error's own words where it has some for people."""
    if isinstance(error, InferenceError | OSError):
        return str(error)
    return f"{type(error).__name__}: {error}"
