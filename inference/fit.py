"""Whether a model fits a machine's memory, and how many answers of which length. No torch.

An estimate from the model's own shape, made before anything is loaded or fetched; the engine works
its pool out again from the memory that is free when it loads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inference.config import ModelConfig
from inference.kv_cache.sizing import Capacity, capacity_table, kv_bytes_per_token
from inference.weights.group_sizes import packed_bytes
from inference.weights.header import GROUPS_FILE, num_elements

BLOCK_SIZE = 16
# Contexts that people ask about; the model's own comes last.
_CONTEXTS = (2_048, 8_192, 32_768)
_SIXTEEN_BITS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The memory that a model may have here."""

    # For people: "this machine's memory", "the memory of cuda:0".
    name: str
    free_bytes: int
    # Share of what the weights leave that the KV pool takes, and the most requests of the longest
    # context that it is made for; None for no bound.
    kv_share: float
    max_full_contexts: int | None = None
    kv_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Fit:
    machine: Machine
    weight_bytes: int
    # Empty when it does not fit: how many answers at once at which context.
    rows: tuple[Capacity, ...]

    @property
    def fits(self) -> bool:
        return bool(self.rows) and self.rows[0].num_requests > 0

    def words(self) -> str:
        """One or two sentences for people."""
        needed, free = _size(self.weight_bytes), _size(self.machine.free_bytes)
        if not self.fits:
            return (
                f"It does not fit {self.machine.name}: its weights need about {needed}, and "
                f"{free} are free."
            )
        counts = ", ".join(
            f"{row.num_requests:,} at {row.context_tokens:,} tokens"
            for row in self.rows
            if row.num_requests
        )
        return (
            f"It fits {self.machine.name}: its weights need about {needed} of {free} that are "
            f"free. Answers at the same time: about {counts}."
        )


def fit(config: ModelConfig, weight_bytes: int, machine: Machine, *, dtype: str) -> Fit:
    """How a model of this shape would do on this machine.

    Args:
        weight_bytes: of the weights as they lie in memory.
        dtype: of keys and values.
    """
    block_bytes = kv_bytes_per_token(config, dtype) * BLOCK_SIZE
    left = machine.free_bytes - weight_bytes
    if left <= 0:
        return Fit(machine, weight_bytes, ())
    pool_bytes = min(left, machine.kv_bytes or int(left * machine.kv_share))
    num_blocks = pool_bytes // block_bytes
    if machine.max_full_contexts is not None and machine.kv_bytes is None:
        per_context = -(-config.max_position // BLOCK_SIZE)
        num_blocks = min(num_blocks, machine.max_full_contexts * per_context)
    rows = capacity_table(num_blocks, BLOCK_SIZE, block_bytes, contexts_of(config.max_position))
    return Fit(machine, weight_bytes, tuple(rows))


def contexts_of(max_position: int) -> Sequence[int]:
    return [*(each for each in _CONTEXTS if each < max_position), max_position]


def weight_bytes_of(folder: Path) -> int:
    """Bytes of a stored model's weights in memory, at most: 16 bits a number, and the quantised
    groups that a GPU keeps beside them.

    Raises:
        ModelLoadError: a file is broken.
    """
    files = [path for path in folder.glob("*.safetensors") if path.name != GROUPS_FILE]
    groups = folder / GROUPS_FILE
    beside = packed_bytes(groups) if groups.is_file() else 0
    return num_elements(files) * _SIXTEEN_BITS + beside


def _size(num_bytes: int) -> str:
    num_bytes = max(num_bytes, 0)
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.0f} MB"
