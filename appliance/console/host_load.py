"""How busy the machine is: processor and memory, and those of the GPU where one serves.

Read at most once a second, on the event loop: a few small files of the kernel, and NVIDIA's
management library, which answers from the driver without disturbing what runs.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any

import psutil
import pynvml

logger = logging.getLogger(__name__)

_CUDA = re.compile(r"cuda:?(\d+)?")


class HostLoad:
    """`read()` gives percent and bytes; a figure that cannot be had is None."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._total_bytes = int(psutil.virtual_memory().total)
        # The first answer of psutil is about the time since it was last asked: nothing yet.
        psutil.cpu_percent(None)
        # None: not looked for yet, or no GPU serves. Looked for again when the device changes.
        self._gpu: Any = None
        self._gpu_of = ""

    def read(self, state: Mapping[str, Any]) -> dict[str, float | int | None]:
        """`cpu_percent` is of all cores together; `memory_bytes` is of this process."""
        device = str((state.get("model") or {}).get("device") or "")
        if device != self._gpu_of:
            self._gpu_of, self._gpu = device, _gpu_named(device)
        return {
            "cpu_percent": psutil.cpu_percent(None),
            "memory_bytes": int(self._process.memory_info().rss),
            "memory_total_bytes": self._total_bytes,
            **(self._read_gpu() if self._gpu is not None else _NO_GPU),
        }

    def _read_gpu(self) -> dict[str, float | int | None]:
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(self._gpu)
            used, total = int(memory.used), int(memory.total)
        except pynvml.NVMLError:
            return _NO_GPU
        try:
            percent: float | None = float(pynvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu)
        except pynvml.NVMLError:
            # A part of a divided GPU has no figure of its own.
            percent = None
        return {
            "gpu_percent": percent,
            "gpu_memory_bytes": used,
            "gpu_memory_total_bytes": total,
        }


_NO_GPU: dict[str, float | int | None] = {
    "gpu_percent": None,
    "gpu_memory_bytes": None,
    "gpu_memory_total_bytes": None,
}


def _gpu_named(device: str) -> Any:
    found = _CUDA.match(device)
    if found is None:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByIndex(int(found.group(1) or 0))
    except pynvml.NVMLError as exc:
        logger.warning("the GPU's load cannot be read: %s", exc)
        return None
