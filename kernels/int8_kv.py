"""Keys and values in 8 bits: int8 with one fp32 scale for each head of each token.

A token's head is scaled so that its largest number becomes 127. Nothing is shared between tokens,
so a token is written once and for all, and between heads, so that a loud one costs others nothing.
"""

import torch
from torch import Tensor

from kernels.checks import FLOATS, check_contiguous, check_device, check_dtype, check_shape
from kernels.errors import KernelArgumentError


def quantise(heads: Tensor) -> tuple[Tensor, Tensor]:
    """[..., head_dim] float -> int8 of that shape, and scales [...] float32."""
    numbers = heads.float()
    most = numbers.abs().amax(dim=-1)
    inverse = torch.where(most > 1e-30, 127.0 / most, 0.0)
    return (numbers * inverse[..., None]).round().clamp(-127, 127).to(torch.int8), most / 127.0


def dequantise(quantised: Tensor, scales: Tensor) -> Tensor:
    """int8 [..., head_dim] and scales [...] -> float32."""
    return quantised.float() * scales[..., None]


def write(heads: Tensor, cache: Tensor, scales: Tensor, slot_mapping: Tensor) -> None:
    """Tokens [num_tokens, num_kv_heads, head_dim] into their slots of a cache; -1 is padding."""
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    quantised, scale = quantise(heads[written])
    cache.flatten(0, 1)[slots] = quantised
    scales.flatten(0, 1)[slots] = scale


def check_caches(
    key_cache: Tensor,
    value_cache: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> None:
    """Contiguous caches of one float dtype; or int8 with contiguous float32 scales
    [num_blocks, block_size, num_kv_heads] of both.

    Raises:
        KernelArgumentError: scales are missing, or a shape, dtype, device or layout is another.
    """
    check_contiguous("key_cache", key_cache)
    check_contiguous("value_cache", value_cache)
    if key_scales is None and value_scales is None:
        check_dtype("key_cache", key_cache, *FLOATS)
        check_dtype("value_cache", value_cache, key_cache.dtype)
        return
    for name, scales, cache_name, cache in (
        ("key_scales", key_scales, "key_cache", key_cache),
        ("value_scales", value_scales, "value_cache", value_cache),
    ):
        if scales is None:
            raise KernelArgumentError(name, None, "a tensor beside the other scales")
        check_dtype(cache_name, cache, torch.int8)
        check_shape(name, scales, *cache.shape[:-1])
        check_dtype(name, scales, torch.float32)
        check_contiguous(name, scales)
        check_device(cache.device, **{name: scales})
