"""A program copies some heads of one token, key and value; padding ends at once."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_launch import power_of_2
from kernels.triton_numbers import round_to

_BLOCK_HEADS = 8


def kv_cache_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
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
    mask = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM)
    key = tl.load(
        key_ptr + token * stride_key_token + heads * stride_key_head + dims, mask=mask, other=0.0
    )
    value = tl.load(
        value_ptr + token * stride_value_token + heads * stride_value_head + dims,
        mask=mask,
        other=0.0,
    )
    places = (slot * NUM_KV_HEADS + heads) * HEAD_DIM + dims
    # By way of fp32, which holds every number of the other two.
    key = round_to(key.to(tl.float32), key_cache_ptr.dtype.element_ty)
    value = round_to(value.to(tl.float32), value_cache_ptr.dtype.element_ty)
    tl.store(key_cache_ptr + places, key, mask=mask)
    tl.store(value_cache_ptr + places, value, mask=mask)
