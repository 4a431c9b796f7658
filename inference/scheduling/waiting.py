"""Everything that waits: three classes, preempted requests, deadlines. No torch.

Order: interactive, api, background; within a class preempted requests first (in the order they were
first admitted), then the fair queue. A class that waited `aging_s` without one of its requests
being started gets the next turn, so a steady stream of chats cannot shut out a script for ever.
Owner: the engine thread.
"""

import heapq
from collections.abc import Collection, Iterable
from itertools import count

from inference.request import Request, RequestClass, RequestStatus
from inference.scheduling.fair_queue import Account, FairQueue

CLASS_ORDER = (RequestClass.INTERACTIVE, RequestClass.API, RequestClass.BACKGROUND)
CLASS_RANK = {request_class: rank for rank, request_class in enumerate(CLASS_ORDER)}


class WaitingRequests:
    """Adding, taking and finding the next request cost O(log owners)."""

    def __init__(self) -> None:
        self.fair = {request_class: FairQueue() for request_class in CLASS_ORDER}
        # (admission number, tie-break, request), lowest first.
        self._preempted: dict[RequestClass, list[tuple[int, int, Request]]] = {
            request_class: [] for request_class in CLASS_ORDER
        }
        # Since when each class waits for a turn; only while it has something waiting.
        self._turn_since_s: dict[RequestClass, float] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._requests: dict[str, Request] = {}
        self._sequence = count()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def add(self, request: Request, now_s: float) -> None:
        self._requests[request.request_id] = request
        self._turn_since_s.setdefault(request.request_class, now_s)
        self.fair[request.request_class].push(request, now_s)
        if request.queue_deadline_s is not None:
            entry = (request.queue_deadline_s, next(self._sequence), request)
            heapq.heappush(self._deadlines, entry)
            if len(self._deadlines) > 64 + 2 * len(self._requests):
                # Most belong to requests that are gone: let go of their prompts.
                self._deadlines = [e for e in self._deadlines if self._is_unstarted(e[2])]
                heapq.heapify(self._deadlines)

    def put_back(self, request: Request, admission: int, now_s: float) -> None:
        """A preempted request, ahead of all of its class that did not start yet."""
        self._requests[request.request_id] = request
        self._turn_since_s.setdefault(request.request_class, now_s)
        entry = (admission, next(self._sequence), request)
        heapq.heappush(self._preempted[request.request_class], entry)

    def discard(self, request_id: str) -> Request | None:
        """Take a request out wherever it stands; None if it does not wait."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        request_class = request.request_class
        if not self.fair[request_class].discard(request):
            # A preempted one: its heap entry is dropped when it comes up.
            self._trim(request_class)
        if not self._has_waiting(request_class):
            self._turn_since_s.pop(request_class, None)
        return request

    def peek(
        self, now_s: float, aging_s: float, classes: Collection[RequestClass] = CLASS_ORDER
    ) -> Request | None:
        """The request to start next among these classes."""
        for request_class in self._turns(now_s, aging_s, classes):
            self._trim(request_class)
            request = self._next_preempted(request_class)
            if request is not None:
                return request
            request = self.fair[request_class].peek(now_s, aging_s)
            if request is not None:
                return request
        return None

    def start(self, request: Request, cost: float, now_s: float) -> Account:
        """Take out a request that starts or starts again; returns its owner's account."""
        request_class = request.request_class
        fair = self.fair[request_class]
        if request.status is RequestStatus.PREEMPTED:
            account = fair.account(request.owner)
            account.num_running += 1
        else:
            account = fair.start(request, cost, now_s)
        del self._requests[request.request_id]
        self._trim(request_class)
        if self._has_waiting(request_class):
            self._turn_since_s[request_class] = now_s
        else:
            self._turn_since_s.pop(request_class, None)
        return account

    def expired(self, now_s: float) -> list[Request]:
        """Requests that never started and whose deadline has passed; they still wait."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            request = heapq.heappop(self._deadlines)[2]
            if self._is_unstarted(request):
                late.append(request)
        return late

    def next_deadline_s(self) -> float | None:
        while self._deadlines and not self._is_unstarted(self._deadlines[0][2]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def order(self, limit: int) -> list[Request]:
        """The next `limit` requests as they would start, aging aside. Not for planning."""
        ordered: list[Request] = []
        for request_class in CLASS_ORDER:
            ordered += [
                request
                for _, _, request in sorted(self._preempted[request_class])
                if self._is_preempted(request)
            ]
            if len(ordered) < limit:
                ordered += self.fair[request_class].order(limit - len(ordered))
        return ordered[:limit]

    def all(self) -> list[Request]:
        return list(self._requests.values())

    def park(self, owner: str) -> None:
        for fair in self.fair.values():
            fair.park(owner)

    def unpark(self, owner: str, now_s: float) -> None:
        for fair in self.fair.values():
            fair.unpark(owner, now_s)

    def unpark_all(self, now_s: float) -> None:
        for fair in self.fair.values():
            for owner in fair.parked_owners():
                fair.unpark(owner, now_s)

    def _next_preempted(self, request_class: RequestClass) -> Request | None:
        """The first whose owner is not at its cap. O(preempted) only while some owner is."""
        heap, fair = self._preempted[request_class], self.fair[request_class]
        if not heap or not fair.is_parked(heap[0][2].owner):
            return heap[0][2] if heap else None
        for _, _, request in sorted(heap):
            if self._is_preempted(request) and not fair.is_parked(request.owner):
                return request
        return None

    def _turns(
        self, now_s: float, aging_s: float, classes: Collection[RequestClass]
    ) -> Iterable[RequestClass]:
        waiting = [each for each in CLASS_ORDER if each in classes and each in self._turn_since_s]
        aged = [each for each in waiting if now_s - self._turn_since_s[each] >= aging_s]
        aged.sort(key=self._turn_since_s.__getitem__)
        return aged + [each for each in waiting if each not in aged]

    def _has_waiting(self, request_class: RequestClass) -> bool:
        return bool(self._preempted[request_class]) or self.fair[request_class].num_waiting > 0

    def _is_unstarted(self, request: Request) -> bool:
        waits = self._requests.get(request.request_id) is request
        return waits and request.status is RequestStatus.WAITING

    def _trim(self, request_class: RequestClass) -> None:
        """Drop heap entries of requests that no longer wait as preempted."""
        heap = self._preempted[request_class]
        while heap and not self._is_preempted(heap[0][2]):
            heapq.heappop(heap)

    def _is_preempted(self, request: Request) -> bool:
        waits = self._requests.get(request.request_id) is request
        return waits and request.status is RequestStatus.PREEMPTED
