"""Rounding and matrix products that mean the same on a device and in Triton's interpreter.

The interpreter cuts bits off where a device rounds to bf16, and multiplies the bit patterns of
bf16 matrices without a word.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from kernels.backends import is_interpreting

_INTERPRETED = tl.constexpr(is_interpreting())


@triton.jit
def round_to(values, dtype: tl.constexpr):
    """fp32 `values` in `dtype`, to the nearest, ties to even."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        values = bits.to(tl.float32, bitcast=True)
    return values.to(dtype)


@triton.jit
def whole_numbers(stored, dtype: tl.constexpr, BITS: tl.constexpr, CENTRE: tl.constexpr):
    """uint8 `stored`, of which BITS are used, less CENTRE; exact in bf16 or fp16.

    Where 1.0 * 2**7 (bf16) or 2**10 (fp16) has room for them below, the bits are put there, and a
    subtraction does the rest: devices convert whole numbers slowly.
    """
    if BITS < 8 or dtype == tl.float16:
        BASE: tl.constexpr = 0x6400 if dtype == tl.float16 else 0x4300
        START: tl.constexpr = 1024 if dtype == tl.float16 else 128
        raised = (stored.to(tl.int16) | BASE).to(dtype, bitcast=True)
        if _INTERPRETED:
            raised = raised.to(tl.float32)
        numbers = raised - (START + CENTRE)
    else:
        numbers = round_to((stored.to(tl.int32) - CENTRE).to(tl.float32), dtype)
    return numbers


@triton.jit
def dot(left, right, sums):
    """sums + left @ right in fp32; products of fp32 are exact, not TF32."""
    if _INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision="ieee")
