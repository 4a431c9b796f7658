"""A program copies some heads of one token, key and value; padding ends at once."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_cache import store_heads
from kernels.triton_launch import power_of_2

_BLOCK_HEADS = 8


def kv_cache_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    num_tokens, num_kv_heads, head_dim = key.shape
    if key.numel() == 0:
        return
    if key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    block_heads = min(_BLOCK_HEADS, power_of_2(num_kv_heads))
    _kv_cache_write_kernel[(num_tokens, triton.cdiv(num_kv_heads, block_heads))](
        key,
        value,
        key_cache,
        value_cache,
        key_scales,
        value_scales,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        slot_mapping.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=block_heads,
        BLOCK_D=power_of_2(head_dim),
        num_warps=4,
    )


@triton.jit
def _kv_cache_write_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scales_ptr,
    value_scales_ptr,
    slots_ptr,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_slots,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token * stride_slots)  # int64: a cache may pass 2 GiB
    if slot < 0:
        return
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    is_head = heads < NUM_KV_HEADS
    mask = is_head & (dims < HEAD_DIM)
    key = tl.load(
        key_ptr + token * stride_key_token + heads * stride_key_head + dims, mask=mask, other=0.0
    )
    value = tl.load(
        value_ptr + token * stride_value_token + heads * stride_value_head + dims,
        mask=mask,
        other=0.0,
    )
    # By way of fp32, which holds every number of the other two.
    places = slot * NUM_KV_HEADS + heads
    key, value = key.to(tl.float32), value.to(tl.float32)
    store_heads(key_cache_ptr, key_scales_ptr, places, is_head, dims, key, HEAD_DIM)
    store_heads(value_cache_ptr, value_scales_ptr, places, is_head, dims, value, HEAD_DIM)
