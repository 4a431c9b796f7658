"""Everything that waits: three classes, preempted requests, deadlines. No torch.

Which class goes next: `class_turns.py`. Within a class preempted requests first (in the order they
were first admitted), then the fair queue. Owner: the engine thread.
"""

import heapq
from collections.abc import Collection, Mapping
from itertools import count

from inference.request import Request, RequestClass, RequestStatus
from inference.scheduling.class_turns import CLASS_ORDER, ClassTurns, merged
from inference.scheduling.fair_queue import Account, FairQueue


class WaitingRequests:
    """Adding, taking and finding the next request cost O(log owners)."""

    def __init__(self) -> None:
        self.turns = ClassTurns()
        self.fair = {each: FairQueue(self.turns.shares[each]) for each in CLASS_ORDER}
        # (admission number, tie-break, request), lowest first.
        self._preempted: dict[RequestClass, list[tuple[int, int, Request]]] = {
            request_class: [] for request_class in CLASS_ORDER
        }
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
        self.turns.enter(request.request_class, now_s)
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
        self.turns.enter(request.request_class, now_s)
        heap = self._preempted[request.request_class]
        if any(entry[2] is request for entry in heap):
            # It started from behind others whose owner was at its cap, and left its entry.
            heap[:] = [entry for entry in heap if entry[2] is not request]
            heapq.heapify(heap)
        heapq.heappush(heap, (admission, next(self._sequence), request))

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
            self.turns.leave(request_class)
        return request

    def peek(
        self, now_s: float, aging_s: float, classes: Collection[RequestClass] = CLASS_ORDER
    ) -> Request | None:
        """The request to start next among these classes."""
        passed: list[RequestClass] = []
        for request_class in self.turns.order(now_s, aging_s):
            is_open = request_class in classes
            request = self._head(request_class, now_s, aging_s) if is_open else None
            if request is not None:
                self.turns.pass_over(passed)
                return request
            passed.append(request_class)
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
        self.turns.take(request_class, now_s, goes_on=self._has_waiting(request_class))
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
        lines: dict[RequestClass, list[Request]] = {}
        num_left = limit
        for request_class in CLASS_ORDER:
            preempted = sorted(self._preempted[request_class])
            line = [request for _, _, request in preempted if self._is_preempted(request)]
            if len(line) < num_left:
                line += self.fair[request_class].order(num_left - len(line))
            lines[request_class] = line
            if self.turns.is_strict:
                num_left = max(0, num_left - len(line))
        return merged(lines, self.turns, limit)

    def set_weights(
        self, owner_weights: Mapping[str, float], class_weights: Mapping[str, float] | None
    ) -> None:
        """Shares of service of owners within a class, and of classes; None is strict order."""
        for fair in self.fair.values():
            fair.set_weights(dict(owner_weights))
        self.turns.set_weights(class_weights)

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

    def _head(self, request_class: RequestClass, now_s: float, aging_s: float) -> Request | None:
        """Its next request that may start."""
        self._trim(request_class)
        return self._next_preempted(request_class) or self.fair[request_class].peek(now_s, aging_s)

    def _next_preempted(self, request_class: RequestClass) -> Request | None:
        """The first whose owner is not at its cap. O(preempted) only while some owner is."""
        heap, fair = self._preempted[request_class], self.fair[request_class]
        if not heap or not fair.is_parked(heap[0][2].owner):
            return heap[0][2] if heap else None
        for _, _, request in sorted(heap):
            if self._is_preempted(request) and not fair.is_parked(request.owner):
                return request
        return None

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
