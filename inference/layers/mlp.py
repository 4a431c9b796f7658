"""Gated MLP: down(activation(gate) * up)."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inference.layers.linear import Linear
from kernels.silu_and_mul import silu_and_mul

Activation = Literal["silu", "gelu_tanh"]


class GatedMLP(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up_proj = Linear(
            hidden_size, intermediate_size, intermediate_size, bias=bias, dtype=dtype, device=device
        )
        self.down_proj = Linear(
            intermediate_size, hidden_size, bias=bias, dtype=dtype, device=device
        )

    def forward(self, hidden_states: Tensor, *, few_rows: bool) -> Tensor:
        gate_up = self.gate_up_proj(
            hidden_states, few_rows=few_rows
        )  # [num_tokens, 2 * intermediate_size]
        if self.activation == "silu":
            activated = silu_and_mul(gate_up)
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            activated = F.gelu(gate, approximate="tanh") * up
        output: Tensor = self.down_proj(activated, few_rows=few_rows)
        return output
