"""Waiting requests of one class, fair between their owners.

Virtual token counter: Sheng et al. 2023, arXiv:2401.00588. Each owner has a counter of the service
it got: prompt tokens when a request starts, output tokens as they come, divided by its weight. The
owner with the least goes next. An owner who returns is lifted to the least counter in the queue, so
that idle time, and time at a cap, saves up no credit. Two things differ from the paper: prompt
tokens found in the prefix cache cost nothing, and an owner whom nobody served for `aging_s` goes
next whatever its counter says. Owner: the engine thread. No torch.
"""

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import count, islice

from inference.request import Request

# The paper's w_p and w_q: an output token costs a whole pass over the weights.
PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0
# Idle accounts are dropped from here on.
_MANY_ACCOUNTS = 4096


@dataclass(eq=False, slots=True)
class ClassShare:
    """The service that a class got, divided by its weight."""

    weight: float = 1.0
    counter: float = 0.0


@dataclass(eq=False, slots=True)
class Account:
    """One owner's service within a class."""

    owner: str
    # Charged along with it.
    share: ClassShare
    weight: float = 1.0
    counter: float = 0.0
    num_running: int = 0
    # In order of arrival.
    waiting: OrderedDict[str, Request] = field(default_factory=OrderedDict)
    # Since when it waits without being served; only while it has waiting requests.
    waiting_since_s: float = 0.0
    # At its cap of running requests or blocks: not eligible until one of them ends.
    is_parked: bool = False
    # Whether the heap has its entry.
    is_in_heap: bool = False

    def charge(self, cost: float) -> None:
        self.counter += cost / self.weight
        self.share.counter += cost / self.share.weight


class FairQueue:
    """O(log owners) a call, whatever the number of waiting requests."""

    def __init__(self, share: ClassShare) -> None:
        self._share = share
        self._accounts: dict[str, Account] = {}
        # (counter, tie-break, owner). Counters only grow, so an entry's counter may be stale but
        # never too high; `_least` refreshes entries as they come up.
        self._heap: list[tuple[float, int, str]] = []
        # Owners with eligible requests, the longest unserved first.
        self._by_wait: OrderedDict[str, None] = OrderedDict()
        # Whose counter newcomers are lifted to while nobody waits.
        self._last_left: Account | None = None
        self._sequence = count()
        self._weights: dict[str, float] = {}
        self._prune_at = _MANY_ACCOUNTS
        self.num_waiting = 0

    def account(self, owner: str) -> Account:
        found = self._accounts.get(owner)
        if found is None:
            if len(self._accounts) >= self._prune_at:
                self._prune()
            found = Account(owner, self._share, self._weights.get(owner, 1.0))
            self._accounts[owner] = found
        return found

    def push(self, request: Request, now_s: float) -> None:
        account = self.account(request.owner)
        if not account.waiting:
            account.counter = max(account.counter, self._floor())
            account.waiting_since_s = now_s
            if not account.is_parked:
                self._enter(account)
        account.waiting[request.request_id] = request
        self.num_waiting += 1

    def discard(self, request: Request) -> bool:
        """Take a request out wherever it stands; False if it is not here."""
        account = self._accounts.get(request.owner)
        if account is None or account.waiting.pop(request.request_id, None) is None:
            return False
        self.num_waiting -= 1
        if not account.waiting:
            self._leave(account)
        return True

    def peek(self, now_s: float, aging_s: float) -> Request | None:
        """The request to start next."""
        if not self._by_wait:
            return None
        longest = self._accounts[next(iter(self._by_wait))]
        if now_s - longest.waiting_since_s >= aging_s:
            return next(iter(longest.waiting.values()))
        least = self._least()
        assert least is not None, "an eligible owner has no heap entry"
        return next(iter(least.waiting.values()))

    def start(self, request: Request, cost: float, now_s: float) -> Account:
        """Take out a request that starts, and charge its owner."""
        account = self._accounts[request.owner]
        self.discard(request)
        account.charge(cost)
        account.num_running += 1
        account.waiting_since_s = now_s
        if account.owner in self._by_wait:
            self._by_wait.move_to_end(account.owner)
        return account

    def park(self, owner: str) -> None:
        account = self.account(owner)
        account.is_parked = True
        self._by_wait.pop(owner, None)

    def unpark(self, owner: str, now_s: float) -> None:
        account = self._accounts.get(owner)
        if account is None or not account.is_parked:
            return
        account.is_parked = False
        if account.waiting:
            account.counter = max(account.counter, self._floor())
            account.waiting_since_s = now_s
            self._enter(account)

    def set_weights(self, weights: dict[str, float]) -> None:
        """Owners not named weigh 1. What was charged before stays as it is."""
        self._weights = dict(weights)
        for account in self._accounts.values():
            account.weight = weights.get(account.owner, 1.0)

    def is_parked(self, owner: str) -> bool:
        account = self._accounts.get(owner)
        return account is not None and account.is_parked

    def parked_owners(self) -> list[str]:
        return [account.owner for account in self._accounts.values() if account.is_parked]

    def order(self, limit: int) -> list[Request]:
        """The next `limit` requests in the order they would start if nothing else changed.

        O((owners + limit) log owners); for queue positions, not for planning.
        """
        heads = [
            (account.counter, index, account, iter(account.waiting.values()))
            for index, account in enumerate(self._accounts[owner] for owner in self._by_wait)
        ]
        heapq.heapify(heads)
        ordered: list[Request] = []
        while heads and len(ordered) < limit:
            counter, index, account, rest = heads[0]
            request = next(rest, None)
            if request is None:
                heapq.heappop(heads)
                continue
            ordered.append(request)
            cost = PROMPT_TOKEN_COST * request.num_prompt_tokens / account.weight
            heapq.heapreplace(heads, (counter + cost, index, account, rest))
        # Last, those who must first end something of their own.
        for account in self._accounts.values():
            if account.is_parked and len(ordered) < limit:
                ordered += islice(account.waiting.values(), limit - len(ordered))
        return ordered

    def _enter(self, account: Account) -> None:
        self._by_wait[account.owner] = None
        if not account.is_in_heap:
            account.is_in_heap = True
            entry = (account.counter, next(self._sequence), account.owner)
            heapq.heappush(self._heap, entry)

    def _leave(self, account: Account) -> None:
        self._by_wait.pop(account.owner, None)
        self._last_left = account

    def _floor(self) -> float:
        lowest = self._least() or self._last_left
        return 0.0 if lowest is None else lowest.counter

    def _least(self) -> Account | None:
        """The eligible owner with the least counter."""
        while self._heap:
            counter, _, owner = self._heap[0]
            account = self._accounts[owner]
            if owner not in self._by_wait:
                heapq.heappop(self._heap)
                account.is_in_heap = False
            elif counter < account.counter:
                heapq.heapreplace(self._heap, (account.counter, next(self._sequence), owner))
            else:
                return account
        return None

    def _prune(self) -> None:
        """Drop idle accounts that a return would lift anyway."""
        floor = self._floor()
        self._accounts = {
            owner: account
            for owner, account in self._accounts.items()
            if account.waiting
            or account.num_running
            or account.is_parked
            or account.is_in_heap
            or account.counter > floor
        }
        self._prune_at = max(_MANY_ACCOUNTS, 2 * len(self._accounts))
