"""The requests that run, their slots, and what the scheduler reports of them. No torch.

Owner: the engine thread.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from inference.request import Request, RequestClass, RequestStatus
from inference.scheduling.class_turns import CLASS_RANK
from inference.scheduling.fair_queue import Account
from inference.scheduling.finish import FinishRules


@dataclass(eq=False, slots=True)
class RunningRequest:
    request: Request
    account: Account
    rules: FinishRules
    # Rises with every start; a preempted request keeps its first one.
    admission: int
    # The parallel slot it keeps while it runs.
    slot: int

    @property
    def num_pending(self) -> int:
        """Known tokens that are not computed yet; 1 when only the newest is."""
        request = self.request
        num_known = len(request.prompt_token_ids) + len(request.output_token_ids)
        return num_known - request.num_computed_tokens

    def precedence(self) -> tuple[int, int]:
        """The highest gives its blocks up first: lowest class, then most recent."""
        return CLASS_RANK[self.request.request_class], self.admission


@dataclass(frozen=True, slots=True)
class Preemption:
    request: Request
    # Computed tokens that have to be computed again, or found in the prefix cache.
    num_tokens_lost: int
    num_blocks: int
    # The live setting with which it would not have happened, and the value that would have done.
    setting: str
    value: int


@dataclass(slots=True)
class SchedulerNews:
    """What happened since it was last taken."""

    # First starts only.
    started: list[Request] = field(default_factory=list)
    preempted: list[Preemption] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)


class RunningRequests:
    """By request id, in order of start."""

    def __init__(self) -> None:
        self._by_id: dict[str, RunningRequest] = {}
        self._by_owner: dict[str, int] = {}
        self._num_interactive = 0
        self._free_slots: list[int] = []
        self._num_slots_made = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[RunningRequest]:
        return iter(self._by_id.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def get(self, request_id: str) -> RunningRequest | None:
        return self._by_id.get(request_id)

    @property
    def num_not_interactive(self) -> int:
        return len(self._by_id) - self._num_interactive

    def num_of(self, owner: str) -> int:
        return self._by_owner.get(owner, 0)

    def add(
        self, request: Request, account: Account, rules: FinishRules, admission: int
    ) -> RunningRequest:
        """Take a request in, on the lowest slot that nobody has."""
        if self._free_slots:
            slot = heapq.heappop(self._free_slots)
        else:
            slot = self._num_slots_made
            self._num_slots_made += 1
        run = RunningRequest(request, account, rules, admission, slot)
        self._by_id[request.request_id] = run
        self._by_owner[request.owner] = self.num_of(request.owner) + 1
        self._num_interactive += request.request_class is RequestClass.INTERACTIVE
        return run

    def remove(self, run: RunningRequest) -> None:
        request = run.request
        del self._by_id[request.request_id]
        heapq.heappush(self._free_slots, run.slot)
        run.account.num_running -= 1
        left = self._by_owner[request.owner] - 1
        if left:
            self._by_owner[request.owner] = left
        else:
            del self._by_owner[request.owner]
        self._num_interactive -= request.request_class is RequestClass.INTERACTIVE

    def victim(self) -> RunningRequest:
        """The one to preempt when blocks run out. O(running)."""
        return max(self._by_id.values(), key=RunningRequest.precedence)

    def check_integrity(self) -> None:
        """Assert every invariant. O(running); for tests and debugging."""
        slots = [run.slot for run in self]
        assert len(set(slots + self._free_slots)) == len(slots) + len(self._free_slots), slots
        for run in self:
            request = run.request
            assert request.status is RequestStatus.RUNNING, f"{request.request_id} is not running"
            num_tokens = request.num_tokens
            assert request.num_computed_tokens < num_tokens <= request.max_len, request.request_id
        owners = [run.request.owner for run in self]
        assert self._by_owner == {owner: owners.count(owner) for owner in owners}
        classes = [run.request.request_class for run in self]
        assert self._num_interactive == classes.count(RequestClass.INTERACTIVE)
