"""Why each waiting request waits, in fields for the console. No torch.

The same questions in the same order as a start asks them (`Scheduler._admit`). Owner: the engine
thread, between steps.
"""

from collections.abc import Mapping, Sequence

from inference.request import Request, RequestClass
from inference.scheduler import Scheduler
from inference.scheduling.admission import is_capped

Wait = Mapping[str, int | str]

# `why` of a wait.
SLOTS = "slots"
RESERVED = "reserved"
MEMORY = "memory"
OWNER = "owner"
BATCH = "batch"
TURN = "turn"


def waits(scheduler: Scheduler, requests: Sequence[Request]) -> list[Wait]:
    """For each of `requests`, as `WaitingRequests.order` gave them: `why`, and blocks it needs.

    `needed` counts blocks of an empty cache. For the one that is next in line and short of memory
    it is exact, and `available` and `kept` (for the growth of running ones) say what it lacks.
    """
    return [_wait(scheduler, request) for request in requests]


def _wait(scheduler: Scheduler, request: Request) -> Wait:
    running, settings, kv = scheduler.running, scheduler.settings, scheduler.kv
    needed = kv.blocks_for(request.num_tokens)
    if settings.policy == "static" and len(running):
        return {"why": BATCH, "needed": needed}
    if is_capped(request, running, kv, settings):
        return {"why": OWNER, "needed": needed}
    if len(running) >= scheduler.limits.max_running:
        return {"why": SLOTS, "needed": needed}
    is_script = request.request_class is not RequestClass.INTERACTIVE
    if is_script and running.num_not_interactive >= scheduler.limits.max_not_interactive:
        return {"why": RESERVED, "needed": needed}
    short = scheduler.shortage
    if short is not None and short.request is request:
        return {
            "why": MEMORY,
            "needed": short.num_needed,
            "available": short.num_available,
            "kept": short.num_kept_free,
        }
    return {"why": TURN, "needed": needed}
