"""Rotary position embedding (arXiv:2104.09864), halves layout: dimension i pairs with i + r/2."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.backends import Backend, choose, lazily
from kernels.checks import FLOATS, check_device, check_dtype, check_last_dim_contiguous, check_shape
from kernels.errors import KernelArgumentError
from kernels.rotary import cpu, reference

_BACKENDS: dict[Backend, Callable[..., Tensor]] = {
    Backend.REFERENCE: reference.rotary,
    Backend.CPU: cpu.rotary,
    Backend.TRITON: lazily("kernels.rotary.triton_rotary", "rotary"),
}


def rotary(heads: Tensor, cos_sin: Tensor, *, backend: Backend | None = None) -> Tensor:
    """Rotate every head of a token by the token's angles.

    Args:
        heads: [num_tokens, num_heads, head_dim] fp32/bf16/fp16; query and key heads may lie side
            by side. Last dimension contiguous; not changed.
        cos_sin: [num_tokens, rotary_dim] fp32; cosines in the first half, sines in the second.
            Dimensions past `rotary_dim` stay as they are.
        backend: which implementation; None takes the fastest for the device.

    Returns:
        As `heads`, a new contiguous tensor.

    Raises:
        KernelArgumentError: a shape, dtype, device or layout is not as above.
    """
    check_shape("heads", heads, None, None, None)
    check_dtype("heads", heads, *FLOATS)
    check_last_dim_contiguous("heads", heads)
    check_shape("cos_sin", cos_sin, heads.shape[0], None)
    check_dtype("cos_sin", cos_sin, torch.float32)
    check_device(heads.device, cos_sin=cos_sin)
    rotary_dim = cos_sin.shape[1]
    if rotary_dim % 2 or rotary_dim > heads.shape[2]:
        raise KernelArgumentError(
            "cos_sin", f"{rotary_dim} wide", f"an even width of at most {heads.shape[2]}"
        )
    return _BACKENDS[backend or choose(heads.device)](heads, cos_sin)
