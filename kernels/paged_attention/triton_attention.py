"""Sends a step's leading requests with one new token to `triton_decode`, the rest to
`triton_prefill`."""

import torch
from torch import Tensor

from kernels.paged_attention.triton_decode import decode
from kernels.paged_attention.triton_prefill import prefill
from kernels.paged_attention.triton_tiles import PagedCaches


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    num_decodes: int | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    if num_decodes is None:
        num_decodes = _count_decodes(query_start_loc)
    if query.stride(2) != 1:
        query = query.contiguous()
    if block_tables.stride(1) != 1:
        block_tables = block_tables.contiguous()
    seq_lens, query_start_loc = seq_lens.contiguous(), query_start_loc.contiguous()
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if query.numel() == 0:
        return output
    caches = PagedCaches(key_cache, value_cache, key_scales, value_scales)
    if num_decodes:
        decode(
            output[:num_decodes],
            query[:num_decodes],
            caches,
            block_tables[:num_decodes],
            seq_lens[:num_decodes],
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
    if num_decodes < query.shape[0]:
        prefill(
            output[num_decodes:],
            query[num_decodes:],
            caches,
            block_tables[num_decodes:],
            seq_lens[num_decodes:],
            query_start_loc[num_decodes:],
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
    return output


def _count_decodes(query_start_loc: Tensor) -> int:
    """Asks the device; a caller who knows the number tells it."""
    counts = query_start_loc.diff().tolist()
    return next((row for row, count in enumerate(counts) if count != 1), len(counts))
