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
def dot(left, right, sums):
    """sums + left @ right in fp32; products of fp32 are exact, not TF32."""
    if _INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision="ieee")
