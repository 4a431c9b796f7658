"""Settings of the scheduler that change while it runs, as asked for. No torch.

Checked on the caller's thread, applied by the engine thread between two steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from inference.config import EngineConfig, InvalidConfig
from inference.request import RequestClass

POLICIES = ("continuous", "static")
SPECULATION = ("off", "on", "auto")
AUTO = "auto"
STRICT = "strict"
CLASSES = tuple(each.value for each in RequestClass)
MAX_SLOTS = 4096
# A shorter context holds no question.
MIN_CONTEXT = 64


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
    # Class -> share of service while several wait, or "strict": interactive, api, background.
    class_weights: Mapping[str, float] | str = STRICT

    @property
    def weights_of_classes(self) -> Mapping[str, float] | None:
        """None for strict order."""
        return None if isinstance(self.class_weights, str) else self.class_weights

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


def shown_value(value: object) -> str:
    """A setting's value as events tell it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {weight:g}" for name, weight in value.items())
    return str(value)


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


def _class_weights(name: str, value: object) -> None:
    if isinstance(value, str) and value == STRICT:
        return
    listed = ", ".join(CLASSES)
    if not isinstance(value, Mapping) or not value:
        allowed = f'"{STRICT}", or weights of {listed},'
        raise InvalidConfig(f"{name} is {value!r}; {allowed} is allowed.")
    for each in value:
        if each not in CLASSES:
            raise InvalidConfig(f"{name} names the class {each!r}; there are {listed}.")
    _weights(name, value)


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
    "class_weights": _class_weights,
}
