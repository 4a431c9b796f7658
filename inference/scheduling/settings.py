"""Settings of the scheduler that change while it runs, and what holds of what was asked. No torch.

Checked on the caller's thread, applied by the engine thread between two steps.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from inference.config import EngineConfig, InvalidConfig
from inference.outputs import Setting

POLICIES = ("continuous", "static")
SPECULATION = ("off", "on", "auto")
AUTO = "auto"
MAX_SLOTS = 4096
# A shorter context holds no question.
MIN_CONTEXT = 64
# What "auto" goes up to, and the length it assumes before it has seen any request.
MAX_AUTO_SLOTS = 256
ASSUMED_TOKENS = 1024
# Finished requests behind the length that is planned for, and how many are needed to trust it.
_RECENT = 200
_ENOUGH = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """As asked for. Every field is a name that `Engine.tune` takes."""

    # Most requests that run at once (`max_num_seqs`), or "auto".
    slots: int | str = AUTO
    # Token budget of a step.
    max_num_batched_tokens: int = 512
    # Most tokens of a prompt and its answer, or "auto": what model and memory allow.
    max_model_len: int | str = AUTO
    # Slots that only interactive requests may take.
    reserved_interactive_slots: int = 0
    max_waiting_requests: int = 1000
    max_waiting_tokens: int = 2_000_000
    enable_prefix_cache: bool = True
    policy: str = "continuous"
    # Lookahead by prompt lookup: off, on, or "auto": where it measures faster.
    speculation: str = AUTO
    # Caps per owner, 0 for none. The blocks are counted when a request starts.
    max_running_per_owner: int = 0
    max_blocks_per_owner: int = 0
    # Share of the memory left by the weights that the KV pool takes, or "auto": as at the start.
    kv_memory_share: float | str = AUTO
    # Share of the pool kept free when a request starts, for the growth of those that run.
    admission_headroom: float = 0.0
    # An owner, or a class, that waited this long without a start goes next.
    aging_s: float = 20.0
    # Contiguous reservation, the baseline beside paging: tokens of room for each request from its
    # start on; 0 is paging.
    reserve_tokens: int = 0
    # Owners not named weigh 1; weight 2 gets twice the service under load.
    owner_weights: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: EngineConfig, default_budget: int) -> "SchedulerSettings":
        return cls(
            slots=AUTO if config.max_num_seqs is None else config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens or default_budget,
            reserved_interactive_slots=config.reserved_interactive_slots,
            max_waiting_requests=config.max_waiting_requests,
            max_waiting_tokens=config.max_waiting_tokens,
            enable_prefix_cache=config.enable_prefix_cache,
            policy=config.policy,
        )


def check_changes(changes: Mapping[str, Any]) -> None:
    """Raises InvalidConfig with the name, what it got and what is allowed."""
    for name, value in changes.items():
        check = _CHECKS.get(name)
        if check is None:
            allowed = ", ".join(_CHECKS)
            raise InvalidConfig(f"{name} is no live setting; there are {allowed}.")
        check(name, value)


def _whole(low: int, high: int, *words: str) -> Callable[[str, object], None]:
    def check(name: str, value: object) -> None:
        if isinstance(value, str) and value in words:
            return
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            also = "".join(f', or "{word}"' for word in words)
            allowed = f"a whole number from {low} to {high:,}{also}"
            raise InvalidConfig(f"{name} is {value!r}; {allowed} is allowed.")

    return check


def _real(low: float, high: float, *words: str) -> Callable[[str, object], None]:
    def check(name: str, value: object) -> None:
        if isinstance(value, str) and value in words:
            return
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:  # type: ignore[operator]
            also = "".join(f', or "{word}"' for word in words)
            raise InvalidConfig(
                f"{name} is {value!r}; a number from {low:g} to {high:g}{also} is allowed."
            )

    return check


def _switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidConfig(f"{name} is {value!r}; true or false is allowed.")


def _one_of(*words: str) -> Callable[[str, object], None]:
    def check(name: str, value: object) -> None:
        if not isinstance(value, str) or value not in words:
            raise InvalidConfig(f"{name} is {value!r}; allowed are {', '.join(words)}.")

    return check


def _weights(name: str, value: object) -> None:
    check = _real(0.01, 100.0)
    if not isinstance(value, Mapping):
        raise InvalidConfig(f"{name} is {value!r}; a mapping of owner to weight is allowed.")
    for owner, weight in value.items():
        check(f"{name}[{owner}]", weight)


_CHECKS: Mapping[str, Callable[[str, object], None]] = {
    "slots": _whole(1, MAX_SLOTS, AUTO),
    "max_num_batched_tokens": _whole(1, 65_536),
    "max_model_len": _whole(MIN_CONTEXT, 100_000_000, AUTO),
    "reserved_interactive_slots": _whole(0, MAX_SLOTS),
    "max_waiting_requests": _whole(1, 1_000_000),
    "max_waiting_tokens": _whole(1, 1_000_000_000),
    "enable_prefix_cache": _switch,
    "policy": _one_of(*POLICIES),
    "speculation": _one_of(*SPECULATION),
    "max_running_per_owner": _whole(0, MAX_SLOTS),
    "max_blocks_per_owner": _whole(0, 100_000_000),
    "kv_memory_share": _real(0.001, 0.95, AUTO),
    "admission_headroom": _real(0.0, 0.9),
    "aging_s": _real(0.1, 86_400.0),
    "reserve_tokens": _whole(0, 10_000_000),
    "owner_weights": _weights,
}


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


def effective_reserved(requested: int, slots: int) -> Setting:
    """One slot is always left for the other classes, so that their requests do not hang."""
    if requested < slots:
        return Setting(requested, requested)
    return Setting(requested, slots - 1, "one slot is left for requests that are not interactive")
