"""Holds the newest pictures of the engine: made by its thread, read by any. No torch."""

from collections.abc import Callable
from dataclasses import replace

from inference.metrics import Metrics
from inference.outputs import BlockMap, EngineStats, RunnerInfo
from inference.scheduler import Scheduler
from inference.stats import NO_BLOCKS, block_map, engine_stats, loading_stats

_STATS_EVERY_S = 0.1
_MAP_EVERY_S = 0.25
# The map is kept fresh this long after somebody asked.
_MAP_WANTED_S = 2.0
# A picture that takes long to make is made less often: at most this share of the time.
_MOST_SHARE = 0.05


class Publisher:
    """Each attribute is replaced whole, so a reader always holds one consistent picture."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.map: BlockMap = NO_BLOCKS
        self._clock = clock
        self._state = "loading"
        self._stats = loading_stats("loading", (0.0, ""), None)
        self._source: tuple[Scheduler, Metrics, RunnerInfo] | None = None
        self._last_step_s = 0.0
        self._next_stats_s = 0.0
        self._next_map_s = 0.0
        self._map_asked_s = float("-inf")
        self._is_map_stale = False

    # ---- any thread

    @property
    def stats(self) -> EngineStats:
        stats = self._stats
        # The state may be ahead of the picture: draining is known before the next step.
        return stats if stats.state == self._state else replace(stats, state=self._state)

    def set_state(self, state: str) -> None:
        if self._state != "dead":
            self._state = state

    def ask_for_map(self) -> bool:
        """Note that somebody looks; True when the engine should be woken to make a new map."""
        self._map_asked_s = now_s = self._clock()
        return self._is_map_stale and now_s >= self._next_map_s

    # ---- engine thread

    def attach(self, scheduler: Scheduler, metrics: Metrics, info: RunnerInfo) -> None:
        """The model is loaded: from here on pictures show it."""
        self._source = (scheduler, metrics, info)
        self._is_map_stale = True
        if self._state == "loading":
            self._state = "ready"

    def on_load_progress(self, share: float, text: str) -> None:
        self._stats = loading_stats("loading", (share, text), None)

    def expire(self) -> None:
        """A setting changed: the next picture is due after this step."""
        self._next_stats_s = 0.0

    def publish(self, *, did_step: bool, did_change: bool) -> None:
        """Between two steps: make what is due. Without a step everything that changed is due.

        Args:
            did_change: who holds which block may be another than at the last call.
        """
        assert self._source is not None, "nothing is loaded"
        scheduler, metrics, info = self._source
        self._last_step_s = now_s = self._clock()
        self._is_map_stale |= did_change
        if not did_step or now_s >= self._next_stats_s:
            self._stats = engine_stats(
                scheduler,
                metrics,
                state=self._state,
                error=None,
                bytes_per_block=info.bytes_per_block,
                last_step_s=self._last_step_s,
                now_s=now_s,
            )
            self._next_stats_s = self._due_after(now_s, _STATS_EVERY_S)
        is_map_wanted = now_s - self._map_asked_s <= _MAP_WANTED_S or self.map is NO_BLOCKS
        if self._is_map_stale and is_map_wanted and now_s >= self._next_map_s:
            before_s = self._clock()
            self.map = block_map(scheduler)
            self._is_map_stale = False
            self._next_map_s = self._due_after(before_s, _MAP_EVERY_S)

    def on_dead(self, error: str) -> None:
        """The last picture: nothing is held any more."""
        self._state = "dead"
        self._stats = replace(
            self._stats, state="dead", error=error, num_running=0, num_waiting=0, requests=()
        )
        self.map = NO_BLOCKS

    def _due_after(self, began_s: float, every_s: float) -> float:
        cost_s = self._clock() - began_s
        return began_s + max(every_s, cost_s / _MOST_SHARE)
