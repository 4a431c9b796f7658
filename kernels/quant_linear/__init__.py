"""Matrix products of few rows with weights in groups of 4 or 8 bits, as a checkpoint has them."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.backends import Backend, choose, lazily
from kernels.checks import check_device, check_dtype, check_last_dim_contiguous, check_shape
from kernels.errors import KernelArgumentError
from kernels.quant_linear import reference
from kernels.quant_linear.packing import QuantWeight

# Past these the weights, read once for all rows, are no longer what takes the time.
MAX_ROWS = 64

_BACKENDS: dict[Backend, Callable[..., Tensor]] = {
    Backend.REFERENCE: reference.quant_linear,
    Backend.CPU: reference.quant_linear,
    Backend.TRITON: lazily("kernels.quant_linear.triton_quant_linear", "quant_linear"),
}


def quant_linear(
    inputs: Tensor,
    weight: QuantWeight,
    bias: Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """inputs @ weight.T + bias, with the weight's exact numbers and sums in fp32.

    Args:
        inputs: [num_rows, depth] bf16/fp16 with 1 to MAX_ROWS rows; last dimension contiguous.
        weight: [num_columns, depth]; see `kernels.quant_linear.packing.pack`.
        bias: [num_columns], inputs' dtype.
        backend: which implementation; None takes the fastest for the device. The CPU has the
            reference alone: its engine multiplies groups in the compiled step.

    Returns:
        [num_rows, num_columns], inputs' dtype: rounded once.

    Raises:
        KernelArgumentError: a shape, dtype, device or layout is not as above.

    Sums that are split along the depth, for matrices of few columns: arXiv:2402.00025.
    """
    check_shape("inputs", inputs, None, weight.depth)
    check_dtype("inputs", inputs, torch.bfloat16, torch.float16)
    check_last_dim_contiguous("inputs", inputs)
    check_device(inputs.device, weight=weight.quants)
    if not 1 <= inputs.shape[0] <= MAX_ROWS:
        raise KernelArgumentError("inputs", f"of {inputs.shape[0]} rows", f"1 to {MAX_ROWS}")
    if bias is not None:
        check_shape("bias", bias, weight.num_columns)
        check_dtype("bias", bias, inputs.dtype)
        check_device(inputs.device, bias=bias)
    return _BACKENDS[backend or choose(inputs.device)](inputs, weight, bias)
