"""What holds of the scheduler's settings, and why it is not what was asked. No torch.

Owner: the engine thread; pictures are made there too.
"""

import math
from collections import deque
from collections.abc import Mapping

from inference.outputs import Setting
from inference.scheduling.settings import AUTO, CLASSES, SchedulerSettings

# What "auto" goes up to, and the length it assumes before it has seen any request.
MAX_AUTO_SLOTS = 256
ASSUMED_TOKENS = 1024
# Finished requests behind the length that is planned for, and how many are needed to trust it.
_RECENT = 200
_ENOUGH = 20


class Limits:
    """Limits that follow from settings, model, pool and the lengths seen."""

    slots: Setting
    reserved: Setting
    context: Setting
    # Most tokens of one request: with this pool and these caps, and as the setting has it.
    hard_max_len: int
    max_len: int
    max_running: int
    max_not_interactive: int

    def __init__(self, model_max_len: int, block_size: int) -> None:
        """`apply` comes before anything else is read."""
        self.lengths = RecentLengths()
        self._model_max_len = model_max_len
        self._block_size = block_size

    def apply(self, settings: SchedulerSettings, *, num_blocks: int, target_blocks: int) -> None:
        """Work everything out.

        Args:
            num_blocks: of the pool as it is.
            target_blocks: what the pool is on its way to; new requests are held to it at once.
        """
        most = min(target_blocks, settings.max_blocks_per_owner or target_blocks)
        self.hard_max_len = min(self._model_max_len, most * self._block_size)
        self.context = effective_context(settings.max_model_len, self.hard_max_len)
        self.max_len = _whole(self.context)
        self.refresh_slots(settings, num_blocks=num_blocks)

    def refresh_slots(self, settings: SchedulerSettings, *, num_blocks: int) -> None:
        """Work the effective slots out again from the lengths seen."""
        self.slots = effective_slots(
            settings.slots,
            pool_tokens=num_blocks * self._block_size,
            max_len=self.max_len,
            budget=settings.max_num_batched_tokens,
            p95=self.lengths.p95(),
        )
        self.max_running = _whole(self.slots)
        self.reserved = effective_reserved(settings.reserved_interactive_slots, self.max_running)
        self.max_not_interactive = self.max_running - _whole(self.reserved)


def _whole(setting: Setting) -> int:
    assert isinstance(setting.effective, int), f"{setting} holds no whole number"
    return setting.effective


class RecentLengths:
    """KV tokens that recently finished requests took of their own; what slots are planned for."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=_RECENT)

    def add(self, num_tokens: int) -> None:
        self._lengths.append(num_tokens)

    def p95(self) -> int | None:
        """The length that 95 of 100 stay under; None while too few have been seen."""
        if len(self._lengths) < _ENOUGH:
            return None
        ordered = sorted(self._lengths)
        return ordered[math.ceil(0.95 * len(ordered)) - 1]


def effective_slots(
    requested: int | str, *, pool_tokens: int, max_len: int, budget: int, p95: int | None
) -> Setting:
    """How many requests may run at once, and why that is not what was asked.

    More slots than the pool holds requests of the length seen would only start requests that are
    preempted soon after; more than the token budget could not all get a token in a step.
    """
    length = min(p95 or ASSUMED_TOKENS, max_len)
    fitting = max(1, pool_tokens // max(1, length))
    seen = "the length that 95 of 100 stay under" if p95 else "the length assumed at first"
    memory = f"the memory holds {fitting:,} requests of {length:,} tokens, {seen}"
    if requested == AUTO:
        slots = min(fitting, MAX_AUTO_SLOTS, max(1, budget // 2))
        reason = memory if slots == fitting else "enough for this machine's steps"
        return Setting(AUTO, slots, reason)
    assert isinstance(requested, int), f"slots is {requested!r}"
    if p95 and fitting < min(requested, budget):
        return Setting(requested, fitting, memory)
    if budget < requested:
        return Setting(requested, budget, f"a step computes {budget:,} tokens, one a request")
    return Setting(requested, requested)


def effective_context(requested: int | str, hard_max_len: int) -> Setting:
    """Most tokens of one request; requests that were accepted before a change keep theirs."""
    if requested == AUTO:
        return Setting(AUTO, hard_max_len, "as long as the model and the memory allow")
    assert isinstance(requested, int), f"max_model_len is {requested!r}"
    if requested > hard_max_len:
        return Setting(requested, hard_max_len, "the model, the memory or a cap allows no more")
    return Setting(requested, requested)


def effective_class_weights(requested: Mapping[str, float] | str) -> Setting:
    """The weight of every class, or strict order."""
    if isinstance(requested, str):
        return Setting(requested, requested)
    effective = {each: requested.get(each, 1.0) for each in CLASSES}
    is_whole = len(requested) == len(CLASSES)
    return Setting(requested, effective, "" if is_whole else "a class that is not named weighs 1")


def effective_reserved(requested: int, slots: int) -> Setting:
    """One slot is always left for the other classes, so that their requests do not hang."""
    if requested < slots:
        return Setting(requested, requested)
    return Setting(requested, slots - 1, "one slot is left for requests that are not interactive")
