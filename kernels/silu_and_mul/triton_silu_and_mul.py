"""One pass: each number is read once and each result written once."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_launch import power_of_2
from kernels.triton_numbers import round_to

_BLOCK = 1024


def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if output.numel() == 0:
        return output
    block = min(_BLOCK, power_of_2(size))
    grid = (num_tokens, triton.cdiv(size, block))
    _silu_and_mul_kernel[grid](output, gate_up, size, BLOCK=block, num_warps=4)
    return output


@triton.jit
def _silu_and_mul_kernel(output_ptr, gate_up_ptr, size, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gates = gate_up_ptr + token * 2 * size + columns
    gate = tl.load(gates, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gates + size, mask=mask, other=0.0).to(tl.float32)
    activated = gate / (1.0 + tl.exp(-gate)) * up
    places = output_ptr + token * size + columns
    tl.store(places, round_to(activated, output_ptr.dtype.element_ty), mask=mask)
