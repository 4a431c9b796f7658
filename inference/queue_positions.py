"""Tells waiting requests how many go before them, a few times a second. Engine thread; no torch."""

from collections.abc import Iterable

from inference.request import Request
from inference.scheduler import Scheduler

# The first ones are told at every look, the rest of a queue of sensible length now and then.
_NEAR = 50
_FAR = 1000
_LOOK_EVERY_S = 0.25
_FAR_EVERY_LOOKS = 8


class QueuePositions:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._told: dict[str, int] = {}
        self._new: list[Request] = []
        self._next_look_s = 0.0
        self._num_looks = 0

    def on_added(self, request: Request) -> None:
        self._new.append(request)

    def on_gone(self, request: Request) -> None:
        self._told.pop(request.request_id, None)

    def changes(self, now_s: float) -> Iterable[tuple[Request, int]]:
        """Requests whose number of requests ahead is not what they were told last."""
        waiting = self._scheduler.waiting
        found: dict[str, tuple[Request, int]] = {}
        num_before = self._scheduler.num_waiting - len(self._new)
        for index, request in enumerate(self._new):
            if waiting.get(request.request_id) is request:
                # Not exact in a fair queue, and put right at the next look.
                found[request.request_id] = (request, max(0, num_before + index))
        self._new.clear()
        if now_s >= self._next_look_s and len(waiting):
            self._next_look_s = now_s + _LOOK_EVERY_S
            limit = _FAR if self._num_looks % _FAR_EVERY_LOOKS == 0 else _NEAR
            self._num_looks += 1
            for position, request in enumerate(waiting.order(limit)):
                found[request.request_id] = (request, position)
        changed = [
            (request, position)
            for request, position in found.values()
            if self._told.get(request.request_id) != position
        ]
        self._told.update((request.request_id, position) for request, position in changed)
        return changed
