"""Rotates some heads of one token in registers."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_launch import power_of_2
from kernels.triton_numbers import round_to

_BLOCK_HEADS = 8


def rotary(heads: Tensor, cos_sin: Tensor) -> Tensor:
    output = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    if output.numel() == 0:
        return output
    cos_sin = cos_sin.contiguous()
    num_tokens, num_heads, head_dim = heads.shape
    half = cos_sin.shape[1] // 2
    block_heads = min(_BLOCK_HEADS, power_of_2(num_heads))
    _rotary_kernel[(num_tokens, triton.cdiv(num_heads, block_heads))](
        output,
        heads,
        cos_sin,
        heads.stride(0),
        heads.stride(1),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=power_of_2(max(half, 1)),
        BLOCK_REST=power_of_2(max(head_dim - 2 * half, 1)),
        num_warps=4,
    )
    return output


@triton.jit
def _rotary_kernel(
    output_ptr,
    heads_ptr,
    cos_sin_ptr,
    stride_token,
    stride_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    dtype: tl.constexpr = output_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    inputs = heads_ptr + token * stride_token + heads * stride_head
    outputs = output_ptr + (token * NUM_HEADS + heads) * HEAD_DIM
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (heads < NUM_HEADS) & (pairs < HALF)
    angles = cos_sin_ptr + token * 2 * HALF + pairs
    cos = tl.load(angles, mask=pairs < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=pairs < HALF, other=0.0)
    first = tl.load(inputs + pairs, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(inputs + HALF + pairs, mask=mask, other=0.0).to(tl.float32)
    tl.store(outputs + pairs, round_to(first * cos - second * sin, dtype), mask=mask)
    tl.store(outputs + HALF + pairs, round_to(second * cos + first * sin, dtype), mask=mask)
    if HEAD_DIM > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        mask = (heads < NUM_HEADS) & (rest < HEAD_DIM)
        tl.store(outputs + rest, tl.load(inputs + rest, mask=mask), mask=mask)
