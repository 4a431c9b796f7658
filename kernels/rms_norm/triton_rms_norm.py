"""The norm, and the norm of a sum, with a row in registers: each number is read once."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_launch import power_of_2
from kernels.triton_numbers import round_to

# Short rows, as those of heads, share a program.
_PROGRAM_SIZE = 1024


def rms_norm(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    output = torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=weight.device)
    rows, num_inner, stride_outer, stride_inner = _rows(hidden_states)
    num_rows, size = output.numel() // max(rows.shape[-1], 1), rows.shape[-1]
    if output.numel() == 0:
        return output
    block, block_rows, num_warps = _tile(size)
    _rms_norm_kernel[(triton.cdiv(num_rows, block_rows),)](
        output,
        rows,
        weight,
        num_rows,
        stride_outer,
        stride_inner,
        eps,
        NUM_INNER=num_inner,
        SIZE=size,
        BLOCK=block,
        BLOCK_ROWS=block_rows,
        num_warps=num_warps,
    )
    return output


def add_rms_norm(
    residual: Tensor, change: Tensor, weight: Tensor, eps: float, change_scale: float
) -> tuple[Tensor, Tensor]:
    residual, change = residual.contiguous(), change.contiguous()
    summed, normed = torch.empty_like(residual), torch.empty_like(residual)
    if summed.numel() == 0:
        return summed, normed
    size = residual.shape[-1]
    num_rows = residual.numel() // size
    block, block_rows, num_warps = _tile(size)
    _add_rms_norm_kernel[(triton.cdiv(num_rows, block_rows),)](
        summed,
        normed,
        residual,
        change,
        weight,
        num_rows,
        eps,
        change_scale,
        IS_SCALED=change_scale != 1.0,
        SIZE=size,
        BLOCK=block,
        BLOCK_ROWS=block_rows,
        num_warps=num_warps,
    )
    return summed, normed


def _rows(values: Tensor) -> tuple[Tensor, int, int, int]:
    """The tensor, its rows in an outer run, and the strides between outer and inner rows."""
    size = values.shape[-1]
    if values.dim() == 3 and values.stride(-1) == 1 and not values.is_contiguous():
        return values, values.shape[1], values.stride(0), values.stride(1)
    return values.contiguous(), 1, size, 0


def _tile(size: int) -> tuple[int, int, int]:
    """Width of a row's tile, rows of a program, warps."""
    block = power_of_2(size)
    block_rows = max(1, _PROGRAM_SIZE // block)
    return block, block_rows, min(max(block * block_rows // 512, 1), 16)


@triton.jit
def _normed(values, weight, eps, SIZE: tl.constexpr):
    mean_square = tl.sum(values * values, axis=1) / SIZE
    return values * (1.0 / tl.sqrt_rn(mean_square + eps))[:, None] * weight[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    output_ptr,
    input_ptr,
    weight_ptr,
    num_rows,
    stride_outer,
    stride_inner,
    eps,
    NUM_INNER: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    starts = (rows // NUM_INNER) * stride_outer + (rows % NUM_INNER) * stride_inner
    values = tl.load(input_ptr + starts[:, None] + columns[None, :], mask=mask, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0)
    normed = _normed(values.to(tl.float32), weight, eps, SIZE)
    places = rows[:, None] * SIZE + columns[None, :]
    tl.store(output_ptr + places, round_to(normed, output_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm_kernel(
    summed_ptr,
    normed_ptr,
    residual_ptr,
    change_ptr,
    weight_ptr,
    num_rows,
    eps,
    change_scale,
    IS_SCALED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    dtype: tl.constexpr = summed_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    places = rows[:, None] * SIZE + columns[None, :]
    residual = tl.load(residual_ptr + places, mask=mask, other=0.0).to(tl.float32)
    change = tl.load(change_ptr + places, mask=mask, other=0.0).to(tl.float32)
    if IS_SCALED:
        change = round_to(change * change_scale, dtype).to(tl.float32)
    # The norm is of the sum as it is kept, as without fusion.
    summed = round_to(residual + change, dtype)
    tl.store(summed_ptr + places, summed, mask=mask)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0)
    normed = _normed(summed.to(tl.float32), weight, eps, SIZE)
    tl.store(normed_ptr + places, round_to(normed, dtype), mask=mask)
