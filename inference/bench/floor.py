"""The least time that a decode step can take here: what it must read, and what it must multiply.

Roofline model (Williams et al., 2009): a step reads every weight and every key and value once, and
multiplies every weight with every row. The machine's own read bandwidth and matrix rate are
measured in the same run as the steps, since machines that are shared change from hour to hour.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from inference.config import ModelConfig
from inference.kv_cache.sizing import DTYPE_BYTES, kv_bytes_per_token
from inference.weights.header import GROUPS_FILE

# Past every cache, so that memory is read.
_READ_BYTES = 512 << 20
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Rates:
    """What this machine does at best, with the threads that torch has."""

    read_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one row of a decode step costs, and what all of them share."""

    weight_bytes: int
    kv_bytes_per_token: int
    flops_per_row: int

    def floor_ms(self, rates: Rates, batch: int, context: int) -> float:
        """The larger of reading and multiplying; in truth neither hides the other wholly."""
        num_bytes = self.weight_bytes + batch * context * self.kv_bytes_per_token
        read_s = num_bytes / rates.read_bytes_per_s
        return max(read_s, batch * self.flops_per_row / rates.flops_per_s) * 1e3


def step_work(model_dir: Path, *, reads_groups: bool, dtype: str, kv_dtype: str) -> StepWork:
    """Of a model folder; `reads_groups` if the path reads the quantised groups as they lie."""
    config = ModelConfig.from_dir(model_dir)
    attention_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * attention_width + 2 * kv_width + 3 * config.intermediate_size)
    numbers = config.num_layers * layer + config.vocab_size * config.hidden_size
    groups = model_dir / GROUPS_FILE
    weight_bytes = numbers * DTYPE_BYTES[dtype]
    if reads_groups and groups.exists():
        weight_bytes = groups.stat().st_size
    return StepWork(weight_bytes, kv_bytes_per_token(config, kv_dtype), 2 * numbers)


def measure(dtype: str) -> Rates:
    """Best of a few runs each. Call it on the thread that owns torch's pool."""
    return Rates(_read_rate(), _matrix_rate(getattr(torch, dtype)))


def _best_s(run: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        started_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - started_s)
    return min(times)


def _read_rate() -> float:
    """Bytes a second of the fastest reader that torch has."""
    numbers = torch.ones(_READ_BYTES // 4)
    matrix, vector = numbers.view(-1, 4096), torch.ones(4096)
    half = numbers.numel() // 2
    first, second = numbers[:half], numbers[half:]
    readers = (lambda: torch.mv(matrix, vector), lambda: torch.dot(first, second), numbers.sum)
    return _READ_BYTES / min(_best_s(reader) for reader in readers)


def _matrix_rate(dtype: torch.dtype, size: int = 2048) -> float:
    """Operations a second of a product of large matrices."""
    left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    return 2 * size**3 / _best_s(lambda: left @ right)
