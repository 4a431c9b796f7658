"""Which class goes next: strict order, or shares of service by weight. No torch.

Strict: interactive, api, background. With weights: the virtual token counter of `fair_queue.py`
once more, one for each class; of the classes that wait, the one with the least service for its
weight goes next. Either way a class that waited `aging_s` without one of its requests being started
gets the next turn, so a steady stream of chats cannot shut out a script for ever.
Owner: the engine thread.
"""

import heapq
from collections.abc import Collection, Mapping, Sequence

from inference.request import Request, RequestClass, RequestStatus
from inference.scheduling.fair_queue import PROMPT_TOKEN_COST, ClassShare

CLASS_ORDER = (RequestClass.INTERACTIVE, RequestClass.API, RequestClass.BACKGROUND)
CLASS_RANK = {request_class: rank for rank, request_class in enumerate(CLASS_ORDER)}


class ClassTurns:
    """Every call is O(classes)."""

    def __init__(self) -> None:
        self.shares = {request_class: ClassShare() for request_class in CLASS_ORDER}
        # None: strict order.
        self._weights: dict[str, float] | None = None
        # Since when each class waits for a turn; only while it has something waiting.
        self._since_s: dict[RequestClass, float] = {}
        # Whose counter newcomers are lifted to while no class waits.
        self._last_left: ClassShare | None = None

    @property
    def is_strict(self) -> bool:
        return self._weights is None

    def set_weights(self, weights: Mapping[str, float] | None) -> None:
        """Classes not named weigh 1. All begin anew: service under another rule is no debt."""
        asked = None if weights is None else dict(weights)
        if asked == self._weights:
            return
        self._weights = asked
        for request_class, share in self.shares.items():
            share.weight = (asked or {}).get(request_class.value, 1.0)
            share.counter = 0.0

    def enter(self, request_class: RequestClass, now_s: float) -> None:
        """It has something waiting, as it may have had before. Idle time saves up no credit."""
        if request_class not in self._since_s:
            self._lift(request_class, self._floor())
            self._since_s[request_class] = now_s

    def leave(self, request_class: RequestClass) -> None:
        """Nothing of it waits any more."""
        if self._since_s.pop(request_class, None) is not None:
            self._last_left = self.shares[request_class]

    def take(self, request_class: RequestClass, now_s: float, *, goes_on: bool) -> None:
        """One of its requests starts; `goes_on` when others of it wait."""
        if goes_on:
            self._since_s[request_class] = now_s
        else:
            self.leave(request_class)

    def order(self, now_s: float, aging_s: float) -> list[RequestClass]:
        """Classes that wait, who goes next first."""
        waiting = [each for each in CLASS_ORDER if each in self._since_s]
        if not self.is_strict:
            waiting.sort(key=lambda each: self.shares[each].counter)
        aged = [each for each in waiting if now_s - self._since_s[each] >= aging_s]
        aged.sort(key=self._since_s.__getitem__)
        return aged + [each for each in waiting if each not in aged]

    def pass_over(self, passed: Collection[RequestClass]) -> None:
        """These could not use their turn (caps, slots kept for others): no credit for that."""
        if passed:
            others = [self.shares[each].counter for each in self._since_s if each not in passed]
            for request_class in passed:
                self._lift(request_class, min(others))

    def _lift(self, request_class: RequestClass, least: float) -> None:
        share = self.shares[request_class]
        share.counter = max(share.counter, least)

    def _floor(self) -> float:
        if self._since_s:
            return min(self.shares[each].counter for each in self._since_s)
        return 0.0 if self._last_left is None else self._last_left.counter


def merged(
    lines: Mapping[RequestClass, Sequence[Request]], turns: ClassTurns, limit: int
) -> list[Request]:
    """One line of the classes' lines, as they would start if nothing else changed."""
    if turns.is_strict:
        return [request for each in CLASS_ORDER for request in lines[each]][:limit]
    rests = {each: iter(line) for each, line in lines.items()}
    heads = [(turns.shares[each].counter, rank, each) for each, rank in CLASS_RANK.items()]
    heapq.heapify(heads)
    line: list[Request] = []
    while heads and len(line) < limit:
        counter, rank, request_class = heads[0]
        request = next(rests[request_class], None)
        if request is None:
            heapq.heappop(heads)
            continue
        line.append(request)
        is_new = request.status is not RequestStatus.PREEMPTED
        cost = is_new * PROMPT_TOKEN_COST * request.num_prompt_tokens
        counter += cost / turns.shares[request_class].weight
        heapq.heapreplace(heads, (counter, rank, request_class))
    return line
