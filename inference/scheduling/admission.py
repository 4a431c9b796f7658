"""Whether a waiting request may start now: memory to leave free, caps per owner. No torch."""

from typing import NamedTuple

from inference.kv_cache.manager import KVCacheManager
from inference.request import Request
from inference.scheduling.running import RunningRequest, RunningRequests
from inference.scheduling.settings import SchedulerSettings

# Most blocks of growth that are kept free for each running request: two to this power.
_MAX_GROWTH_DOUBLINGS = 6


class Shortage(NamedTuple):
    """Blocks when a start was put off: lacked because needed + kept free > available."""

    request: Request
    num_needed: int
    # To be left to running requests for their growth.
    num_kept_free: int
    num_available: int
    # For fewer running ones less is kept free.
    num_running: int

    def still_holds(self, request: Request, num_available: int, num_running: int) -> bool:
        """Whether nothing has changed that could let `request` start; never when nothing runs."""
        is_as_short = num_available <= self.num_available and num_running >= self.num_running
        return self.request is request and num_running > 0 and is_as_short


def blocks_kept_free(
    request: Request, running: RunningRequests, kv: KVCacheManager, settings: SchedulerSettings
) -> int:
    """Blocks that a start must leave: for prompts under way, and for the growth of what runs.

    A request that was preempted leaves twice as many each time, so that two growing ones do not
    take turns in throwing each other out. O(running).
    """
    promised = 0
    for run in running:
        missing = kv.blocks_for(run.request.num_tokens) - kv.num_blocks_of(run.request.request_id)
        promised += max(0, missing)
    growth = len(running) << min(request.num_preemptions, _MAX_GROWTH_DOUBLINGS)
    headroom = int(settings.admission_headroom * kv.pool.num_blocks)
    return promised + max(growth, headroom)


class OverCap(NamedTuple):
    """An owner's requests would hold more blocks than they may."""

    # Who makes room for the others.
    victim: RunningRequest
    # Blocks that would do for all of them.
    num_needed: int


def over_cap(
    run: RunningRequest,
    num_tokens: int,
    running: RunningRequests,
    kv: KVCacheManager,
    settings: SchedulerSettings,
) -> OverCap | None:
    """Which of its owner's requests must make room before `run` may have `num_tokens` tokens: the
    most recent of the lowest class, which may be itself; None within the cap, and for the owner's
    only one, whose length the cap bounds when it is accepted. O(running) where a cap is set.
    """
    cap, owner = settings.max_blocks_per_owner, run.request.owner
    if not cap or running.num_of(owner) < 2:
        return None
    own = [each for each in running if each.request.owner == owner]
    needed = sum(
        kv.blocks_for(num_tokens if each is run else each.request.num_tokens) for each in own
    )
    return OverCap(max(own, key=RunningRequest.precedence), needed) if needed > cap else None


def is_capped(
    request: Request, running: RunningRequests, kv: KVCacheManager, settings: SchedulerSettings
) -> bool:
    """Whether its owner has as much running as one owner may; never when it has nothing."""
    num_running = running.num_of(request.owner)
    if not num_running:
        return False
    if 0 < settings.max_running_per_owner <= num_running:
        return True
    if not settings.max_blocks_per_owner:
        return False
    held = sum(
        kv.blocks_for(run.request.num_tokens)
        for run in running
        if run.request.owner == request.owner
    )
    return held + kv.blocks_for(request.num_tokens) > settings.max_blocks_per_owner
