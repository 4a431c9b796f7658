"""Rotate queries and keys, and scatter keys and values into the paged KV cache, in one pass."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.backends import Backend, choose, lazily
from kernels.checks import (
    FLOATS,
    check_contiguous,
    check_device,
    check_dtype,
    check_last_dim_contiguous,
    check_shape,
)
from kernels.errors import KernelArgumentError
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
    backend: Backend | None = None,
) -> Tensor:
    """Rotate every query and key head by its token's angles; keys and values go to their slots.

    Args:
        query_key: [num_tokens, num_heads + num_kv_heads, head_dim] fp32/bf16/fp16, queries first;
            last dimension contiguous, not changed.
        value: [num_tokens, num_kv_heads, head_dim], query_key's dtype, last dimension contiguous.
        cos_sin: [num_tokens, rotary_dim] fp32; see `rotary`.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous;
            changed in place. May have another float dtype, tokens are rounded to it.
        slot_mapping: [num_tokens] int64, block_id * block_size + offset; -1 is padding and is
            not written. No slot twice.
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
    check_dtype("key_cache", key_cache, *FLOATS)
    check_dtype("value_cache", value_cache, key_cache.dtype)
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    check_last_dim_contiguous("query_key", query_key)
    check_last_dim_contiguous("value", value)
    check_contiguous("key_cache", key_cache)
    check_contiguous("value_cache", value_cache)
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
    rotate = _BACKENDS[backend or choose(query_key.device)]
    return rotate(query_key, value, cos_sin, key_cache, value_cache, slot_mapping)
