"""Random paged attention problems of any head size and block size."""

import torch
from torch import Tensor


def problem(
    rng: torch.Generator,
    lengths: list[tuple[int, int]],
    *,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Arguments of `paged_attention` for (new tokens, context) of each request.

    Blocks lie in shuffled order, NaN is wherever no token lies, and table entries past a
    request's length point nowhere.
    """
    num_heads, num_kv_heads = heads
    max_blocks = max(-(-seq // block_size) for _, seq in lengths) + 1
    order = torch.randperm(len(lengths) * max_blocks, generator=rng).int()
    tables = order.view(len(lengths), max_blocks)
    shape = (tables.numel(), block_size, num_kv_heads, head_dim)
    caches = [torch.full(shape, float("nan")) for _ in range(2)]
    for row, (_, seq_len) in enumerate(lengths):
        positions = torch.arange(seq_len)
        blocks = tables[row, positions // block_size].long()
        for cache in caches:
            tokens = torch.randn(seq_len, num_kv_heads, head_dim, generator=rng)
            cache[blocks, positions % block_size] = tokens
        tables[row, -(-seq_len // block_size) :] = 2**30
    counts = torch.tensor([0] + [new for new, _ in lengths])
    query = torch.randn(int(counts.sum()), num_heads, head_dim, generator=rng)
    return {
        "query": query.to(dtype),
        "key_cache": caches[0].to(dtype),
        "value_cache": caches[1].to(dtype),
        "block_tables": tables,
        "seq_lens": torch.tensor([seq for _, seq in lengths], dtype=torch.int32),
        "query_start_loc": counts.cumsum(0).int(),
    }
