"""How long something takes on a device."""

import statistics
from collections.abc import Callable

import torch


def seconds(call: Callable[[], object], repeats: int = 10) -> float:
    """Median time on the device; each time after 256 MB were written, so that no cache helps."""
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)
