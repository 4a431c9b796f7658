"""A program takes some columns of the output and goes along their groups; the rows are the narrow
side of its products, so that few of them waste little.

A group's whole numbers are exact in 16 bits: they are multiplied as they are, and its scale
multiplies the fp32 product. With few columns the depth is split among programs, and a second kernel
adds their sums. How often depends on the matrix alone, never on the rows.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.quant_linear.packing import QuantWeight
from kernels.triton_launch import num_processors, power_of_2
from kernels.triton_numbers import dot, round_to, whole_numbers

_BLOCK_N = 64
# Programs for each multiprocessor that a split shall give at least.
_PROGRAMS_EACH = 2
_MAX_SPLITS = 16
# A split goes along at least this many pairs of groups.
_MIN_PAIRS = 4
_SUM_BLOCK = 512


def quant_linear(inputs: Tensor, weight: QuantWeight, bias: Tensor | None) -> Tensor:
    num_rows, num_columns = inputs.shape[0], weight.num_columns
    num_pairs = weight.scales.shape[0] // 2
    blocks = triton.cdiv(num_columns, _BLOCK_N)
    num_splits = choose_num_splits(blocks, num_pairs, num_processors(inputs.device))
    output = torch.empty(num_rows, num_columns, dtype=inputs.dtype, device=inputs.device)
    partial = output
    if num_splits > 1:
        shape = (num_splits, num_rows, num_columns)
        partial = torch.empty(shape, dtype=torch.float32, device=inputs.device)
    _quant_linear_kernel[(blocks, num_splits)](
        partial,
        inputs,
        weight.quants,
        weight.scales,
        weight.mins,
        bias if num_splits == 1 else None,
        num_rows,
        num_columns,
        weight.depth,
        inputs.stride(0),
        num_pairs,
        triton.cdiv(num_pairs, num_splits),
        GROUP=weight.group,
        BITS=weight.bits,
        CENTRE=weight.centre,
        **tile_options(num_rows),
    )
    if num_splits > 1:
        _sum_splits_kernel[(num_rows, triton.cdiv(num_columns, _SUM_BLOCK))](
            output,
            partial,
            bias,
            num_rows,
            num_columns,
            NUM_SPLITS=num_splits,
            BLOCK=_SUM_BLOCK,
            num_warps=4,
        )
    return output


def choose_num_splits(blocks: int, num_pairs: int, processors: int) -> int:
    """Programs that share the depth of one block of columns: a power of 2."""
    wanted = min(_PROGRAMS_EACH * processors // blocks, num_pairs // _MIN_PAIRS, _MAX_SPLITS)
    return 1 << (max(wanted, 1).bit_length() - 1)


def tile_options(num_rows: int) -> dict[str, int]:
    """Sizes of tiles, warps and stages; a matrix product takes at least 16 rows."""
    return {
        "BLOCK_M": max(power_of_2(num_rows), 16),
        "BLOCK_N": _BLOCK_N,
        "num_warps": 4,
        "num_stages": 4,
    }


@triton.jit
def _add_group(
    sums,
    quants,
    group,
    columns,
    rows,
    input_ptr,
    scales_ptr,
    mins_ptr,
    num_rows,
    num_columns,
    groups_apart,
    depth,
    stride_input,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    CENTRE: tl.constexpr,
):
    """`sums` [BLOCK_N, BLOCK_M] and what the group at `group` of every column adds to them."""
    places = group * GROUP + tl.arange(0, GROUP)
    mask = (places < depth)[:, None] & (rows < num_rows)[None, :]
    pointers = input_ptr + rows[None, :] * stride_input + places[:, None]
    inputs = tl.load(pointers, mask=mask, other=0.0)
    weights = whole_numbers(quants, inputs.dtype, BITS, CENTRE)
    products = dot(weights, inputs, tl.zeros([quants.shape[0], rows.shape[0]], tl.float32))
    at = group * groups_apart + columns
    scales = tl.load(scales_ptr + at, mask=columns < num_columns, other=0.0).to(tl.float32)
    sums += products * scales[:, None]
    if mins_ptr is not None:
        mins = tl.load(mins_ptr + at, mask=columns < num_columns, other=0.0).to(tl.float32)
        sums += mins[:, None] * tl.sum(inputs.to(tl.float32), axis=0)[None, :]
    return sums


@triton.jit(do_not_specialize=["num_rows", "num_pairs", "pairs_each"])
def _quant_linear_kernel(
    output_ptr,
    input_ptr,
    quants_ptr,
    scales_ptr,
    mins_ptr,
    bias_ptr,
    num_rows,
    num_columns,
    depth,
    stride_input,
    num_pairs,
    pairs_each,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    CENTRE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    first = split * pairs_each
    end = tl.minimum(first + pairs_each, num_pairs)
    is_column = columns < num_columns
    offsets = columns[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    groups_apart = tl.full([], 0, tl.int64) + num_columns  # a matrix may pass 2 GiB
    group_bytes = groups_apart * GROUP
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for pair in range(first, end):
        if BITS == 4:
            packed = tl.load(
                quants_ptr + pair * group_bytes + offsets, mask=is_column[:, None], other=0
            )
            even = packed & 15
            odd = packed >> 4
        else:
            pointers = quants_ptr + 2 * pair * group_bytes + offsets
            even = tl.load(pointers, mask=is_column[:, None], other=0)
            odd = tl.load(pointers + group_bytes, mask=is_column[:, None], other=0)
        for half in tl.static_range(2):
            sums = _add_group(
                sums,
                even if half == 0 else odd,
                2 * pair + half,
                columns,
                rows,
                input_ptr,
                scales_ptr,
                mins_ptr,
                num_rows,
                num_columns,
                groups_apart,
                depth,
                stride_input,
                GROUP,
                BITS,
                CENTRE,
            )
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=is_column, other=0.0)
        sums += bias.to(tl.float32)[:, None]
    places = (split * num_rows + rows)[None, :] * num_columns + columns[:, None]
    mask = is_column[:, None] & (rows < num_rows)[None, :]
    tl.store(output_ptr + places, round_to(sums, output_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_splits_kernel(
    output_ptr,
    partial_ptr,
    bias_ptr,
    num_rows,
    num_columns,
    NUM_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    sums = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        places = (split * num_rows + row) * num_columns + columns
        sums += tl.load(partial_ptr + places, mask=mask, other=0.0)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    rounded = round_to(sums, output_ptr.dtype.element_ty)
    tl.store(output_ptr + row * num_columns + columns, rounded, mask=mask)
