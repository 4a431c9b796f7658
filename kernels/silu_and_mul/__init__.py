"""The gate of a gated MLP (SwiGLU, arXiv:2002.05202)."""

from collections.abc import Callable

from torch import Tensor

from kernels.backends import Backend, choose, lazily
from kernels.checks import FLOATS, check_dtype
from kernels.errors import KernelArgumentError
from kernels.silu_and_mul import cpu, reference

_BACKENDS: dict[Backend, Callable[..., Tensor]] = {
    Backend.REFERENCE: reference.silu_and_mul,
    Backend.CPU: cpu.silu_and_mul,
    Backend.TRITON: lazily("kernels.silu_and_mul.triton_silu_and_mul", "silu_and_mul"),
}


def silu_and_mul(gate_up: Tensor, *, backend: Backend | None = None) -> Tensor:
    """silu(gate) * up.

    Args:
        gate_up: [num_tokens, 2 * size] fp32/bf16/fp16, gate then up; not changed.
        backend: which implementation; None takes the fastest for the device.

    Returns:
        [num_tokens, size], a new tensor of `gate_up`'s dtype.

    Raises:
        KernelArgumentError: a shape or dtype is not as above.
    """
    check_dtype("gate_up", gate_up, *FLOATS)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise KernelArgumentError(
            "gate_up", f"of shape {list(gate_up.shape)}", "[num_tokens, 2 * size]"
        )
    return _BACKENDS[backend or choose(gate_up.device)](gate_up)
