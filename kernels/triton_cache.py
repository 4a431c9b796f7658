"""How heads are written into a cache of any dtype, int8 with a scale for each head among them."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from kernels.triton_numbers import round_to


@triton.jit
def store_scale(scales_ptr, places, is_head, largest):
    """Write the scales of heads whose largest numbers are given; returns what makes those 127.

    See kernels.int8_kv.
    """
    tl.store(scales_ptr + places, tl.div_rn(largest, 127.0), mask=is_head)
    return tl.where(largest > 1e-30, tl.div_rn(127.0, tl.maximum(largest, 1e-30)), 0.0)


@triton.jit
def as_stored(values, inverse, dtype: tl.constexpr):
    """fp32 `values` in the cache's dtype; to the nearest, ties to even. `inverse` is for int8."""
    if dtype == tl.int8:
        # Adding 1.5 * 2**23 leaves no bits behind the point.
        whole = (values * inverse + 12582912.0) - 12582912.0
        stored = tl.minimum(tl.maximum(whole, -127.0), 127.0).to(tl.int8)
    else:
        stored = round_to(values, dtype)
    return stored


@triton.jit
def store_heads(cache_ptr, scales_ptr, places, is_head, dims, heads, HEAD_DIM: tl.constexpr):
    """Write fp32 `heads` [num_heads, BLOCK_D], zeros past HEAD_DIM, into a cache.

    `places` and `is_head` are [num_heads, 1]: the cache's heads are counted from its start.
    """
    dtype: tl.constexpr = cache_ptr.dtype.element_ty
    inverse = 1.0
    if dtype == tl.int8:
        largest = tl.max(tl.abs(heads), axis=1, keep_dims=True)
        inverse = store_scale(scales_ptr, places, is_head, largest)
    pointers = cache_ptr + places * HEAD_DIM + dims
    mask = is_head & (dims < HEAD_DIM)
    tl.store(pointers, as_stored(heads, inverse, dtype), mask=mask)
