"""What prefill and decode share: tiles of keys and values out of blocks, and the softmax's step.

Online softmax: arXiv:1805.02867. Scores are kept times log2(e): a device has exp2 in hardware.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_numbers import dot, round_to

_LOG2_E = tl.constexpr(1.4426950408889634)


class PagedCaches(NamedTuple):
    """What attention reads, in the order of the kernels' arguments."""

    key: Tensor
    value: Tensor
    # Of int8 caches; see kernels.int8_kv.
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def multiply_as_half(self, dtype: torch.dtype) -> bool:
        """Whether products are of 16 bits: `dtype` holds every number of the caches."""
        return dtype != torch.float32 and self.key.dtype in (dtype, torch.int8)


@triton.jit
def slots_of(table_ptr, positions, seq_len, BLOCK_SIZE: tl.constexpr):
    """[BLOCK_N] int64 slots of the tokens at `positions`; 0 past the context's end."""
    in_context = positions < seq_len
    blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=in_context, other=0).to(tl.int64)
    return blocks * BLOCK_SIZE + tl.where(in_context, positions % BLOCK_SIZE, 0)


@triton.jit
def load_tile(
    cache_ptr,
    rows,
    is_token,
    dims,
    dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """[BLOCK_N, BLOCK_D] of `dtype`: the cache's rows of HEAD_DIM numbers.

    What lies past the context's end may be NaN: with MASKED only rows with `is_token` are read.
    """
    pointers = cache_ptr + rows[:, None] * HEAD_DIM + dims[None, :]
    if MASKED:
        if BLOCK_D == HEAD_DIM:
            tile = tl.load(pointers, mask=is_token[:, None], other=0.0)
        else:
            tile = tl.load(pointers, mask=is_token[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif BLOCK_D == HEAD_DIM:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    if tile.dtype != dtype:
        tile = round_to(tile.to(tl.float32), dtype)
    return tile


@triton.jit
def attend_tile(
    sums,
    largest,
    weight_sum,
    query,
    query_positions,
    positions,
    key_ptr,
    value_ptr,
    key_scales_ptr,
    value_scales_ptr,
    table_ptr,
    seq_len,
    kv_head,
    scale,
    soft_cap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take the tokens at `positions` [BLOCK_N] into the rows' softmax; returns its new state.

    Without MASKED every row sees every one of them. `query` is [BLOCK_M, BLOCK_D]; `sums` are the
    weighted values, `largest` the greatest score and `weight_sum` the sum of weights so far.
    """
    dtype: tl.constexpr = query.dtype
    dims = tl.arange(0, BLOCK_D)
    is_token = positions < seq_len
    rows = slots_of(table_ptr, positions, seq_len, BLOCK_SIZE) * NUM_KV_HEADS + kv_head
    key = load_tile(key_ptr, rows, is_token, dims, dtype, HEAD_DIM, BLOCK_D, MASKED)
    scores = tl.zeros([query.shape[0], positions.shape[0]], tl.float32)
    scores = dot(query, tl.trans(key), scores)
    if key_ptr.dtype.element_ty == tl.int8:
        scores *= tl.load(key_scales_ptr + rows, mask=is_token, other=0.0)[None, :]
    if HAS_SOFT_CAP:
        # tanh by way of exp2, which may pass the largest float and then gives 1.
        bent = 1.0 - 2.0 / (tl.exp2(scores * (scale * 2.0 * _LOG2_E / soft_cap)) + 1.0)
        scores = bent * (soft_cap * _LOG2_E)
    else:
        scores = scores * (scale * _LOG2_E)
    if MASKED:
        visible = (positions[None, :] <= query_positions[:, None]) & is_token[None, :]
        if SLIDING_WINDOW > 0:
            visible &= positions[None, :] > query_positions[:, None] - SLIDING_WINDOW
        scores = tl.where(visible, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    # A row that has seen nothing yet has no greatest score; any finite one will do.
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest) if MASKED else new_largest
    weights = tl.exp2(scores - shift[:, None])
    kept = tl.exp2(largest - shift)
    value = load_tile(value_ptr, rows, is_token, dims, dtype, HEAD_DIM, BLOCK_D, MASKED)
    weight_sum = weight_sum * kept + tl.sum(weights, axis=1)
    if value_ptr.dtype.element_ty == tl.int8:
        # The greatest number of each token's head, near 1 as a rule, where a scale may be too small
        # for fp16. `divisor` has the other 127.
        greatest = tl.load(value_scales_ptr + rows, mask=is_token, other=0.0) * 127.0
        weights *= greatest[None, :]
    sums = dot(round_to(weights, dtype), value, sums * kept[:, None])
    return sums, new_largest, weight_sum


@triton.jit
def divisor(weight_sum, value_ptr):
    """What sums of weighted values are divided by at the end."""
    if value_ptr.dtype.element_ty == tl.int8:
        weight_sum *= 127.0
    return weight_sum
