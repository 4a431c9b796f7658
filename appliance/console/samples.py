"""One sample a second of the numbers that are plotted, for the last 15 minutes."""

from collections import deque
from collections.abc import Mapping
from typing import Any

KEEP_SAMPLES = 900
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
)


class Samples:
    def __init__(self) -> None:
        # (tick, values in the order of COLUMNS)
        self._ring: deque[tuple[int, list[float | None]]] = deque(maxlen=KEEP_SAMPLES)

    def observe(self, state: Mapping[str, Any], now: float, tick: int) -> None:
        """Take a sample if a second has passed since the last one."""
        if self._ring and now - (self._ring[-1][1][0] or 0.0) < 0.95:
            return
        kv = state.get("kv") or {}
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
        )
        self._ring.append((tick, [None if v is None else round(float(v), 3) for v in values]))

    def delta_since(self, base: int) -> list[list[float | None]]:
        found: list[list[float | None]] = []
        for tick, values in reversed(self._ring):
            if tick <= base:
                break
            found.append(values)
        found.reverse()
        return found
