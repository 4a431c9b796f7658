"""How a step's budget is shared: between decodes in turn, and between prompts. No torch."""

from inference.request import RequestStatus
from inference.scheduling.running import RunningRequest

# The oldest prompt gets at least one part in this many of what is left for prompts.
_OLDEST_PROMPT_SHARE = 4


class DecodeTurns:
    """Whose turn it is when the budget, lowered below what runs, does not do for all."""

    def __init__(self) -> None:
        self._rotation = 0

    def of(
        self, decodes: list[RunningRequest], budget: int, has_prompts: bool
    ) -> list[RunningRequest]:
        """All of them, or as many as there is room for."""
        room = budget - 1 if has_prompts and budget > 1 else budget
        if len(decodes) <= room:
            return decodes
        first = self._rotation % len(decodes)
        self._rotation = first + room
        return (decodes[first:] + decodes[:first])[:room]


def prompt_shares(prompts: list[RunningRequest], budget: int) -> list[tuple[RunningRequest, int]]:
    """Who gets how much of what decodes left: the shortest first, so that they start soonest.

    The oldest keeps a share, so that short ones cannot hold up a long one for ever.
    """
    prompts = [run for run in prompts if run.request.status is RequestStatus.RUNNING]
    if not prompts or budget < 1:
        return []
    oldest = min(prompts, key=lambda run: run.admission)
    kept = min(oldest.num_pending, max(1, budget // _OLDEST_PROMPT_SHARE))
    prompts.sort(key=lambda run: (run.num_pending, run.admission))
    shares = []
    left = budget - kept
    for run in prompts:
        already = kept if run is oldest else 0
        more = min(run.num_pending - already, left)
        left -= more
        if already + more:
            shares.append((run, already + more))
    return shares
