"""One sample a second of the numbers that are plotted, for the last hour."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

KEEP_SAMPLES = 3600
# As much as a page that opens gets; it asks for longer times by themselves.
FRESH_PAGE_SAMPLES = 900
COLUMNS = (
    "t",
    "decode",
    "prefill",
    "ttft_p50",
    "ttft_p95",
    "itl_p50",
    "itl_p95",
    "waiting",
    "running",
    "kv",
    "host_ms",
    "forward_ms",
    # Within the last minute.
    "preempted",
    # Percent, GiB.
    "cpu",
    "memory",
    "gpu",
    "gpu_memory",
)
# What stands for several samples: the highest where that is what people look for, else the mean.
_HIGHEST = frozenset(
    ("ttft_p95", "itl_p95", "waiting", "running", "kv", "memory", "gpu_memory")
)  # fmt: skip
_GIB = 2**30
_PREEMPTED_OVER_S = 60.0

Sample = list[float | None]


def merged(samples: Sequence[Sequence[float | None]], at: float) -> Sample:
    """One row for all of `samples`, at time `at`."""
    row: Sample = [at]
    for name, values in zip(COLUMNS[1:], list(zip(*samples, strict=True))[1:], strict=True):
        known = [value for value in values if value is not None]
        if not known:
            row.append(None)
        else:
            row.append(round(max(known) if name in _HIGHEST else sum(known) / len(known), 3))
    return row


class Samples:
    def __init__(self) -> None:
        # (tick, values in the order of COLUMNS)
        self._ring: deque[tuple[int, Sample]] = deque(maxlen=KEEP_SAMPLES)
        # (time, preemptions since the start of the engine)
        self._preemptions: deque[tuple[float, int]] = deque()

    def is_due(self, now: float) -> bool:
        """Whether a second has passed since the last sample."""
        return not self._ring or now - (self._ring[-1][1][0] or 0.0) >= 0.95

    def observe(self, state: Mapping[str, Any], now: float, tick: int) -> Sample | None:
        """Take a sample if one is due, and return it."""
        if not self.is_due(now):
            return None
        kv, host = state.get("kv") or {}, state.get("host") or {}
        total = kv.get("blocks_total") or 0
        ttft, itl = state.get("ttft_s") or {}, state.get("itl_s") or {}
        values = (
            now,
            state.get("decode_tokens_per_s"),
            state.get("prefill_tokens_per_s"),
            ttft.get("p50"),
            ttft.get("p95"),
            itl.get("p50"),
            itl.get("p95"),
            state.get("waiting"),
            state.get("running"),
            100.0 * kv.get("blocks_used", 0) / total if total else None,
            state.get("step_host_ms"),
            state.get("step_forward_ms"),
            self._preempted((state.get("totals") or {}).get("preemptions"), now),
            host.get("cpu_percent"),
            _gib(host.get("memory_bytes")),
            host.get("gpu_percent"),
            _gib(host.get("gpu_memory_bytes")),
        )
        sample = [None if v is None else round(float(v), 3) for v in values]
        self._ring.append((tick, sample))
        return sample

    def since(self, t: float) -> list[Sample]:
        return [sample for _, sample in self._ring if (sample[0] or 0.0) >= t]

    def delta_since(self, base: int) -> list[Sample]:
        found = list(self._newer_than(base))
        found.reverse()
        return found

    def _newer_than(self, base: int) -> Iterator[Sample]:
        for number, (tick, sample) in enumerate(reversed(self._ring)):
            if tick <= base or number == FRESH_PAGE_SAMPLES:
                return
            yield sample

    def _preempted(self, count: int | None, now: float) -> int | None:
        if count is None:
            return None
        past = self._preemptions
        if past and count < past[-1][1]:
            # Another engine counts from zero.
            past.clear()
        past.append((now, count))
        while now - past[0][0] > _PREEMPTED_OVER_S:
            past.popleft()
        return count - past[0][1]


def _gib(number_of_bytes: float | None) -> float | None:
    return None if number_of_bytes is None else number_of_bytes / _GIB
