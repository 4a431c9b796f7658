"""Notices a step that hangs, and that an engine has ended. No torch.

It looks at times only, from a thread of its own, so a step that never returns cannot stop it. What
hangs is most often a native call (a kernel, a driver, a disk), and a thread in one cannot be ended
from outside: the engine is given up, so that nobody waits for it, and the process has to end if
the call does not return.
"""

import logging
import sys
import threading
import traceback
from collections.abc import Callable

from inference.engine import Engine

logger = logging.getLogger(__name__)

# The longest step of a large model on a slow machine ends well before this.
HANG_S = 60.0
# A step that was given up may still return: then the engine is rebuilt in this process.
LOST_S = 60.0


class Watchdog:
    """Watches one engine. Owner: the supervisor's thread.

    `step_seconds` of the engine comes from the engine's clock; `clock` is monotonic too.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float],
        *,
        hang_s: float = HANG_S,
        lost_s: float = LOST_S,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._hang_s = hang_s
        self._lost_s = lost_s
        self._given_up_s: float | None = None

    def has_hung(self) -> bool:
        """Give the engine up when its step takes too long; True the one time that it does."""
        if self._engine.ending.error is not None or self._given_up_s is not None:
            return False
        seconds = self._engine.step_seconds
        if seconds <= self._hang_s:
            return False
        self._given_up_s = self._clock()
        logger.critical(
            "a step of the engine has not ended for %.0f seconds; the engine is given up. If the "
            "step does not return within %.0f seconds, the process ends. The engine thread is "
            "at:\n%s",
            seconds,
            self._lost_s,
            stack_of(self._engine.thread),
        )
        self._engine.abandon(f"a step did not end within {self._hang_s:.0f} seconds")
        return True

    @property
    def is_stuck(self) -> bool:
        """The engine was given up and its thread is still in the step."""
        thread = self._engine.thread
        return self._given_up_s is not None and thread is not None and thread.is_alive()

    @property
    def is_lost(self) -> bool:
        """Stuck for so long that only the end of the process helps."""
        given_up_s = self._given_up_s
        is_late = given_up_s is not None and self._clock() - given_up_s > self._lost_s
        return is_late and self.is_stuck


def stack_of(thread: threading.Thread | None) -> str:
    """Where a thread is, as far as Python knows: the line that called into native code."""
    frame = None if thread is None else sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "(it runs no Python code)"
    return "".join(traceback.format_stack(frame))
