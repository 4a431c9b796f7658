"""Root-mean-square layer norm (arXiv:1910.07467)."""

import torch
from torch import Tensor

from kernels.backends import Backend, choose
from kernels.checks import FLOATS, check_device, check_dtype, check_shape
from kernels.rms_norm import cpu, reference

_BACKENDS = {Backend.REFERENCE: reference.rms_norm, Backend.CPU: cpu.rms_norm}


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
