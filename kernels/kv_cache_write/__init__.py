"""Scatter this step's keys and values into their slots of the paged KV cache."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.backends import Backend, choose, lazily
from kernels.checks import FLOATS, check_device, check_dtype, check_shape
from kernels.int8_kv import check_caches
from kernels.kv_cache_write import cpu, reference

_BACKENDS: dict[Backend, Callable[..., None]] = {
    Backend.REFERENCE: reference.kv_cache_write,
    Backend.CPU: cpu.kv_cache_write,
    Backend.TRITON: lazily("kernels.kv_cache_write.triton_write", "kv_cache_write"),
}


def kv_cache_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    backend: Backend | None = None,
) -> None:
    """Write each token's key and value into its slot; changes the caches in place.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim] fp32/bf16/fp16.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous;
            may have another float dtype, tokens are rounded to it.
        slot_mapping: [num_tokens] int64, block_id * block_size + offset; -1 is padding and is
            not written. No slot twice.
        key_scales, value_scales: with int8 caches, [num_blocks, block_size, num_kv_heads] float32,
            written too; see kernels.int8_kv.
        backend: which implementation; None takes the fastest for the device.

    Raises:
        KernelArgumentError: a shape, dtype, device or layout is not as above.
    """
    check_shape("key", key, None, None, None)
    num_tokens, num_kv_heads, head_dim = key.shape
    check_shape("value", value, num_tokens, num_kv_heads, head_dim)
    check_shape("key_cache", key_cache, None, None, num_kv_heads, head_dim)
    check_shape("value_cache", value_cache, *key_cache.shape)
    check_shape("slot_mapping", slot_mapping, num_tokens)
    check_dtype("key", key, *FLOATS)
    check_dtype("value", value, key.dtype)
    check_caches(key_cache, value_cache, key_scales, value_scales)
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    check_device(
        key.device,
        value=value,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slot_mapping,
    )
    backend = backend or choose(key.device)
    arguments = (key, value, key_cache, value_cache, slot_mapping)
    if key_scales is None:
        _BACKENDS[backend](*arguments)
    elif backend is Backend.TRITON:
        _BACKENDS[backend](*arguments, key_scales, value_scales)
    else:
        reference.kv_cache_write(*arguments, key_scales, value_scales)
