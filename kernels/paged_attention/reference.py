"""One request after the other: gather its keys and values, then the formula in fp32."""

import torch
from torch import Tensor


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
) -> Tensor:
    output = query.new_empty(query.shape)
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    group = query.shape[1] // num_kv_heads
    bounds = query_start_loc.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        start, end = bounds[row], bounds[row + 1]
        if start == end:
            continue
        blocks = block_tables[row, : -(-seq_len // block_size)].long()
        key = key_cache[blocks].flatten(0, 1)[:seq_len].float()  # [seq_len, num_kv_heads, head_dim]
        value = value_cache[blocks].flatten(0, 1)[:seq_len].float()
        grouped = query[start:end].float().reshape(-1, num_kv_heads, group, head_dim)
        scores = torch.einsum("qkgd,skd->kgqs", grouped, key) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        positions = torch.arange(seq_len, device=query.device)
        query_positions = positions[seq_len - (end - start) :, None]
        visible = positions <= query_positions
        if sliding_window is not None:
            visible &= positions > query_positions - sliding_window
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        attended = torch.einsum("kgqs,skd->qkgd", weights, value)
        output[start:end] = attended.reshape(end - start, -1, head_dim).to(query.dtype)
    return output
