"""A program rotates some heads of one token: first programs those of queries, then those of keys,
which also copy the values. Keys go from registers to the cache."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_cache import as_stored, store_heads, store_scale
from kernels.triton_launch import power_of_2
from kernels.triton_numbers import round_to

_BLOCK_HEADS = 8


def rotary_kv_write(
    query_key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    num_tokens, num_kv_heads, head_dim = value.shape
    num_heads = query_key.shape[1] - num_kv_heads
    query = torch.empty(
        num_tokens, num_heads, head_dim, dtype=query_key.dtype, device=query_key.device
    )
    if query.numel() == 0:
        return query
    half = cos_sin.shape[1] // 2
    block_heads = min(_BLOCK_HEADS, power_of_2(num_heads))
    query_programs = triton.cdiv(num_heads, block_heads)
    _rotary_kv_write_kernel[(num_tokens, query_programs + triton.cdiv(num_kv_heads, block_heads))](
        query,
        query_key,
        value,
        cos_sin.contiguous(),
        key_cache,
        value_cache,
        key_scales,
        value_scales,
        slot_mapping.contiguous(),
        query_key.stride(0),
        query_key.stride(1),
        value.stride(0),
        value.stride(1),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        QUERY_PROGRAMS=query_programs,
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_HEADS=block_heads,
        BLOCK_D=power_of_2(head_dim),
        BLOCK_HALF=power_of_2(max(half, 1)),
        BLOCK_REST=power_of_2(max(head_dim - 2 * half, 1)),
        num_warps=4,
    )
    return query


@triton.jit
def _rotate(
    output_ptr,
    scales_ptr,
    places,
    inputs,
    cos_sin_ptr,
    token,
    is_head,
    dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Rotate the heads at `inputs` [heads, 1] into `places`, counted in heads; rounded to `dtype`,
    then as `output_ptr` holds them."""
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    mask = is_head & (pairs < HALF)
    angles = cos_sin_ptr + token * 2 * HALF + pairs
    cos = tl.load(angles, mask=pairs < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=pairs < HALF, other=0.0)
    first = tl.load(inputs + pairs, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(inputs + HALF + pairs, mask=mask, other=0.0).to(tl.float32)
    low = round_to(first * cos - second * sin, dtype).to(tl.float32)
    high = round_to(second * cos + first * sin, dtype).to(tl.float32)
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    is_rest = is_head & (rest < HEAD_DIM)
    kept = tl.load(inputs + rest, mask=is_rest, other=0.0).to(tl.float32)
    stored: tl.constexpr = output_ptr.dtype.element_ty
    inverse = 1.0
    if stored == tl.int8:
        largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=1, keep_dims=True)
        largest = tl.maximum(largest, tl.max(tl.abs(kept), axis=1, keep_dims=True))
        inverse = store_scale(scales_ptr, places, is_head, largest)
    outputs = output_ptr + places * HEAD_DIM
    tl.store(outputs + pairs, as_stored(low, inverse, stored), mask=mask)
    tl.store(outputs + HALF + pairs, as_stored(high, inverse, stored), mask=mask)
    if HEAD_DIM > 2 * HALF:
        tl.store(outputs + rest, as_stored(kept, inverse, stored), mask=is_rest)


@triton.jit
def _rotary_kv_write_kernel(
    query_ptr,
    query_key_ptr,
    value_ptr,
    cos_sin_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scales_ptr,
    value_scales_ptr,
    slots_ptr,
    stride_token,
    stride_head,
    stride_value_token,
    stride_value_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    QUERY_PROGRAMS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    lanes = tl.arange(0, BLOCK_HEADS)[:, None]
    row = query_key_ptr + token * stride_token
    if part < QUERY_PROGRAMS:
        heads = part * BLOCK_HEADS + lanes
        _rotate(
            query_ptr,
            query_ptr,  # no scales
            token * NUM_HEADS + heads,
            row + heads * stride_head,
            cos_sin_ptr,
            token,
            heads < NUM_HEADS,
            dtype,
            HEAD_DIM,
            HALF,
            BLOCK_HALF,
            BLOCK_REST,
        )
    else:
        slot = tl.load(slots_ptr + token)  # int64: a cache may pass 2 GiB
        if slot >= 0:
            heads = (part - QUERY_PROGRAMS) * BLOCK_HEADS + lanes
            is_head = heads < NUM_KV_HEADS
            places = slot * NUM_KV_HEADS + heads
            _rotate(
                key_cache_ptr,
                key_scales_ptr,
                places,
                row + (NUM_HEADS + heads) * stride_head,
                cos_sin_ptr,
                token,
                is_head,
                dtype,
                HEAD_DIM,
                HALF,
                BLOCK_HALF,
                BLOCK_REST,
            )
            dims = tl.arange(0, BLOCK_D)[None, :]
            mask = is_head & (dims < HEAD_DIM)
            values = value_ptr + token * stride_value_token + heads * stride_value_head + dims
            value = tl.load(values, mask=mask, other=0.0).to(tl.float32)
            store_heads(value_cache_ptr, value_scales_ptr, places, is_head, dims, value, HEAD_DIM)
