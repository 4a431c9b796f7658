"""PyTorch's fused attention over gathered blocks: decodes of like length in one call.

The query heads that share a key-value head are laid out as rows of one attention problem, so that
keys and values are read once and never repeated. Requests with several new tokens run one by one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# A batch of decodes is padded to its longest request; a request shorter than this share of the
# longest starts a batch of its own, so at most half of what is read is padding.
_MIN_FILL = 0.5


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
    lengths: list[int] = seq_lens.tolist()
    bounds: list[int] = query_start_loc.tolist()
    decodes: list[int] = []
    for row, seq_len in enumerate(lengths):
        start, end = bounds[row], bounds[row + 1]
        if end - start == 1:
            decodes.append(row)
        elif end > start:
            part = slice(row, row + 1)
            key, value = _gather(
                key_cache, value_cache, block_tables[part], seq_lens[part], seq_len
            )
            visible = _visible(
                torch.arange(seq_len - (end - start), seq_len)[None], seq_len, sliding_window
            )
            attended = _attend(query[None, start:end], key, value, visible, scale, soft_cap)
            output[start:end] = attended[0]
    for rows in _like_lengths(decodes, lengths):
        tokens = torch.tensor([bounds[row] for row in rows])
        longest = lengths[rows[0]]
        group_lens = seq_lens[rows]
        key, value = _gather(key_cache, value_cache, block_tables[rows], group_lens, longest)
        visible = _visible(group_lens[:, None] - 1, longest, sliding_window)
        attended = _attend(query[tokens][:, None], key, value, visible, scale, soft_cap)
        output[tokens] = attended[:, 0]
    return output


def _like_lengths(rows: list[int], lengths: list[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    for row in sorted(rows, key=lengths.__getitem__, reverse=True):
        if groups and lengths[row] >= _MIN_FILL * lengths[groups[-1][0]]:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _gather(
    key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    """[num_requests, longest, num_kv_heads, head_dim] of keys and of values.

    A request's padding repeats its own last token: what lies in the cache past its end may be
    another's NaN, and masked NaN is still NaN.
    """
    block_size = key_cache.shape[1]
    positions = torch.minimum(torch.arange(longest), seq_lens[:, None].long() - 1)
    slots = block_tables.gather(1, positions // block_size).long() * block_size
    slots += positions % block_size
    shape = (*slots.shape, *key_cache.shape[2:])
    return (
        key_cache.flatten(0, 1).index_select(0, slots.flatten()).view(shape),
        value_cache.flatten(0, 1).index_select(0, slots.flatten()).view(shape),
    )


def _visible(query_positions: Tensor, seq_len: int, sliding_window: int | None) -> Tensor:
    """[num_requests, num_queries, seq_len] bool from [num_requests, num_queries] positions."""
    positions = torch.arange(seq_len)
    visible = positions <= query_positions[..., None]
    if sliding_window is not None:
        visible &= positions > query_positions[..., None] - sliding_window
    return visible


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    scale: float,
    soft_cap: float | None,
) -> Tensor:
    """[num_requests, num_queries, num_heads, head_dim], as `query`."""
    num_requests, num_queries, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    group = num_heads // num_kv_heads
    grouped = query.reshape(num_requests, num_queries, num_kv_heads, group, head_dim)
    # [num_requests, num_kv_heads, group * num_queries, head_dim]
    rows = grouped.permute(0, 2, 3, 1, 4).flatten(2, 3)
    key = key.transpose(1, 2).to(query.dtype)
    value = value.transpose(1, 2).to(query.dtype)
    mask = visible[:, None].repeat(1, 1, group, 1)
    if soft_cap is None:
        attended = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
    else:
        scores = rows.float() @ key.float().transpose(2, 3) * scale
        scores = soft_cap * torch.tanh(scores / soft_cap)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        attended = (weights @ value.float()).to(query.dtype)
    split = attended.reshape(num_requests, num_kv_heads, group, num_queries, head_dim)
    return split.permute(0, 3, 1, 2, 4).reshape(query.shape)
