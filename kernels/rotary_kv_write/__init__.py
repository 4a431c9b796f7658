"""Rotary position embedding (arXiv:2104.09864), and keys and values into the paged KV cache, in one
pass. Halves layout: dimension i pairs with i + rotary_dim / 2."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.backends import Backend, choose, lazily
from kernels.checks import (
    FLOATS,
    check_device,
    check_dtype,
    check_last_dim_contiguous,
    check_shape,
)
from kernels.errors import KernelArgumentError
from kernels.int8_kv import check_caches
from kernels.rotary_kv_write import cpu, reference

_BACKENDS: dict[Backend, Callable[..., Tensor]] = {
    Backend.REFERENCE: reference.rotary_kv_write,
    Backend.CPU: cpu.rotary_kv_write,
    Backend.TRITON: lazily("kernels.rotary_kv_write.triton_rotary_kv_write", "rotary_kv_write"),
}


def rotary_kv_write(
    query_key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Rotate every query and key head by its token's angles; keys and values go to their slots.

    Args:
        query_key: [num_tokens, num_heads + num_kv_heads, head_dim] fp32/bf16/fp16, queries first;
            last dimension contiguous, not changed.
        value: [num_tokens, num_kv_heads, head_dim], query_key's dtype, last dimension contiguous.
        cos_sin: [num_tokens, rotary_dim] fp32; cosines in the first half, sines in the second.
            Dimensions past `rotary_dim` stay as they are.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous;
            changed in place. May have another float dtype, tokens are rounded to it.
        slot_mapping: [num_tokens] int64, block_id * block_size + offset; -1 is padding and is
            not written. No slot twice.
        key_scales, value_scales: with int8 caches, [num_blocks, block_size, num_kv_heads] float32,
            written too; see kernels.int8_kv.
        backend: which implementation; None takes the fastest for the device.

    Returns:
        [num_tokens, num_heads, head_dim], the rotated queries, of padding too; last
        dimension contiguous.

    Raises:
        KernelArgumentError: a shape, dtype, device or layout is not as above.
    """
    check_shape("value", value, None, None, None)
    num_tokens, num_kv_heads, head_dim = value.shape
    check_shape("query_key", query_key, num_tokens, None, head_dim)
    check_shape("cos_sin", cos_sin, num_tokens, None)
    check_shape("key_cache", key_cache, None, None, num_kv_heads, head_dim)
    check_shape("value_cache", value_cache, *key_cache.shape)
    check_shape("slot_mapping", slot_mapping, num_tokens)
    check_dtype("query_key", query_key, *FLOATS)
    check_dtype("value", value, query_key.dtype)
    check_dtype("cos_sin", cos_sin, torch.float32)
    check_caches(key_cache, value_cache, key_scales, value_scales)
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    check_last_dim_contiguous("query_key", query_key)
    check_last_dim_contiguous("value", value)
    check_device(
        query_key.device,
        value=value,
        cos_sin=cos_sin,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slot_mapping,
    )
    if query_key.shape[1] <= num_kv_heads:
        raise KernelArgumentError(
            "query_key", f"of {query_key.shape[1]} heads", f"more than {num_kv_heads} heads"
        )
    rotary_dim = cos_sin.shape[1]
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise KernelArgumentError(
            "cos_sin", f"{rotary_dim} wide", f"an even width of at most {head_dim}"
        )
    backend = backend or choose(query_key.device)
    arguments = (query_key, value, cos_sin, key_cache, value_cache, slot_mapping)
    if key_scales is None:
        return _BACKENDS[backend](*arguments)
    if backend is Backend.TRITON:
        return _BACKENDS[backend](*arguments, key_scales, value_scales)
    return reference.rotary_kv_write(*arguments, key_scales, value_scales)
