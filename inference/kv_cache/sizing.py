"""How much memory a conversation takes, and how many fit, from the model's own shape. No torch.

Grouped-query attention (arXiv:2305.13245) is in it: only key-value heads are kept. A sliding window
is not: every layer keeps every token, so that any prefix can be shared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from inference.config import ModelConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
# Numbers in 8 bits have a float32 scale for each head of each token.
SCALE_BYTES = {"int8": 4}


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many requests of one length the pool holds at once."""

    context_tokens: int
    num_requests: int
    bytes_per_request: int


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What requests of given lengths take, and which share of it holds a token."""

    num_slots: int
    share_full: float


def kv_bytes_per_token(model: ModelConfig, dtype: str) -> int:
    """Keys and values of one token over all layers."""
    heads = 2 * model.num_layers * model.num_kv_heads
    return heads * (model.head_dim * DTYPE_BYTES[dtype] + SCALE_BYTES.get(dtype, 0))


def blocks_that_fit(memory_bytes: int, model: ModelConfig, block_size: int, dtype: str) -> int:
    return memory_bytes // (kv_bytes_per_token(model, dtype) * block_size)


def capacity_table(
    num_blocks: int, block_size: int, bytes_per_block: int, contexts: Sequence[int]
) -> list[Capacity]:
    """Rows for "this many users at that context", nothing shared between them."""
    rows = []
    for context_tokens in contexts:
        num_each = blocks_for(context_tokens, block_size)
        rows.append(Capacity(context_tokens, num_blocks // num_each, num_each * bytes_per_block))
    return rows


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def paged_use(lengths: Sequence[int], block_size: int) -> MemoryUse:
    """Requests of these lengths in blocks: only the last one of each is not full."""
    num_slots = sum(blocks_for(length, block_size) for length in lengths) * block_size
    return MemoryUse(num_slots, sum(lengths) / num_slots)


def contiguous_use(lengths: Sequence[int], reserved_tokens: int) -> MemoryUse:
    """The baseline: each request has room for `reserved_tokens` in one piece from its start on."""
    num_slots = reserved_tokens * len(lengths)
    return MemoryUse(num_slots, sum(lengths) / num_slots)
