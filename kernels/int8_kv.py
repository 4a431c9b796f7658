"""Keys and values in 8 bits: int8 with one fp32 scale for each head of each token.

A token's head is scaled so that its largest number becomes 127. Nothing is shared between tokens,
so a token is written once and for all, and between heads, so that a loud one costs others nothing.
"""

import torch
from torch import Tensor

from kernels.checks import check_contiguous, check_device, check_dtype, check_shape
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


def check_scales(
    key_cache: Tensor,
    value_cache: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> None:
    """Scales of int8 caches: both, contiguous float32 [num_blocks, block_size, num_kv_heads].

    Raises:
        KernelArgumentError: one is missing, or a shape, dtype, device or layout is another.
    """
    for name, scales, cache_name, cache in (
        ("key_scales", key_scales, "key_cache", key_cache),
        ("value_scales", value_scales, "value_cache", value_cache),
    ):
        if scales is None:
            raise KernelArgumentError(name, None, "a tensor beside the other scales")
        check_dtype(cache_name, cache, torch.int8)
        check_contiguous(cache_name, cache)
        check_shape(name, scales, *cache.shape[:-1])
        check_dtype(name, scales, torch.float32)
        check_contiguous(name, scales)
        check_device(cache.device, **{name: scales})
