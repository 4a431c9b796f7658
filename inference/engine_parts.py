"""What the engine is put together from, and how it ends. No torch."""

import logging
import threading
from collections.abc import Callable

from inference.config import EngineConfig
from inference.errors import EngineDead, InferenceError
from inference.kv_cache.manager import KVCacheManager
from inference.kv_cache.resizing import PoolMemory
from inference.outputs import Runner, RunnerInfo
from inference.scheduler import Scheduler
from inference.scheduling.settings import SchedulerSettings

logger = logging.getLogger(__name__)

LOADING = "The model is still loading. Try again in a moment."
STOPPING = "The server is stopping. Try again in a moment."
CUT_OFF = "The server stopped before the answer was complete."
STEP_FAILED = "The model failed while computing this answer. Try again."
STOPPED = "The server has stopped."
DEAD = "The engine stopped working. Try again in a moment; if it goes on, tell the administrator."


class Ending:
    """Whether, and why, an engine has ended. Set once, by whichever thread ends it."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        # As the engine's callers read it; None while it lives.
        self.error: InferenceError | None = None
        # The same for administrators, with the cause.
        self.cause = ""
        self._on_end = on_end
        self._lock = threading.Lock()

    def set(self, error: InferenceError, cause: str) -> bool:
        """False when it has ended before."""
        with self._lock:
            if self.error is not None:
                return False
            self.cause = cause
            self.error = error
            return True

    def raise_if_set(self) -> None:
        """
        Raises:
            EngineDead: the engine has ended.
        """
        if self.error is not None:
            raise EngineDead(str(self.error))

    def tell(self) -> None:
        """Call whoever wanted to know."""
        self._on_end()


def make_scheduler(
    config: EngineConfig,
    info: RunnerInfo,
    runner: Runner,
    settings: SchedulerSettings,
    load_id: int,
) -> Scheduler:
    """A scheduler over the loaded model's blocks.

    Args:
        load_id: another one for each load, since a cache lives and dies with the loaded weights.
    """
    kv = KVCacheManager(
        info.num_blocks,
        info.block_size,
        model_version=f"{info.model_name}:{load_id}",
        enable_prefix_cache=config.enable_prefix_cache,
    )
    memory = PoolMemory(
        info.bytes_per_block, info.kv_budget_bytes, runner.move_blocks, runner.resize_kv
    )
    return Scheduler(
        settings,
        kv,
        max_len=min(config.max_model_len or info.max_model_len, info.max_model_len),
        eos_token_ids=info.eos_token_ids,
        memory=memory,
    )


def close_runner(runner: Runner) -> None:
    try:
        runner.close()
    except Exception:
        logger.exception("the runner could not give its memory back")


def named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
