"""Root-mean-square layer norm (arXiv:1910.07467)."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.backends import Backend, choose, lazily
from kernels.checks import FLOATS, check_device, check_dtype, check_shape
from kernels.rms_norm import cpu, reference

_BACKENDS: dict[Backend, Callable[..., Tensor]] = {
    Backend.REFERENCE: reference.rms_norm,
    Backend.CPU: cpu.rms_norm,
    Backend.TRITON: lazily("kernels.rms_norm.triton_rms_norm", "rms_norm"),
}
_ADD_BACKENDS: dict[Backend, Callable[..., tuple[Tensor, Tensor]]] = {
    Backend.REFERENCE: reference.add_rms_norm,
    Backend.CPU: cpu.add_rms_norm,
    Backend.TRITON: lazily("kernels.rms_norm.triton_rms_norm", "add_rms_norm"),
}


def rms_norm(
    hidden_states: Tensor, weight: Tensor, eps: float, *, backend: Backend | None = None
) -> Tensor:
    """Scale the last dimension to a root mean square of one, then by `weight`.

    Args:
        hidden_states: [..., size] fp32/bf16/fp16, not changed.
        weight: [size] fp32.
        eps: added to the mean square.
        backend: which implementation; None takes the fastest for the device.

    Returns:
        As `hidden_states`, a new tensor; computed in fp32 and rounded once.

    Raises:
        KernelArgumentError: a shape, dtype or device is not as above.
    """
    check_dtype("hidden_states", hidden_states, *FLOATS)
    check_shape("weight", weight, hidden_states.shape[-1])
    check_dtype("weight", weight, torch.float32)
    check_device(hidden_states.device, weight=weight)
    return _BACKENDS[backend or choose(hidden_states.device)](hidden_states, weight, eps)


def add_rms_norm(
    residual: Tensor,
    change: Tensor,
    weight: Tensor,
    eps: float,
    *,
    change_scale: float = 1.0,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """Add what a block adds to the residual stream, and norm the sum for the next block.

    Args:
        residual: [..., size] fp32/bf16/fp16, not changed.
        change: as `residual`; multiplied by `change_scale` first.
        weight: [size] fp32.
        eps: added to the mean square.
        backend: which implementation; None takes the fastest for the device.

    Returns:
        The sum and its norm, new tensors as `residual`. Product, sum and norm are rounded to the
        dtype one after the other, as the three operations apart would.

    Raises:
        KernelArgumentError: a shape, dtype or device is not as above.
    """
    check_dtype("residual", residual, *FLOATS)
    check_dtype("change", change, residual.dtype)
    check_shape("change", change, *residual.shape)
    check_shape("weight", weight, residual.shape[-1])
    check_dtype("weight", weight, torch.float32)
    check_device(residual.device, change=change, weight=weight)
    add = _ADD_BACKENDS[backend or choose(residual.device)]
    return add(residual, change, weight, eps, change_scale)
