"""Root-mean-square norm with the checkpoint's weight."""

import torch
from torch import Tensor, nn

from kernels.rms_norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """Norm of the last dimension. The weight is kept in fp32: it is small, and adding `offset`
    to a 16-bit weight would round it.

    Args:
        offset: added to the checkpoint's weight; 1 in families that store it around zero.
    """

    def __init__(self, size: int, *, eps: float, offset: float = 0.0, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        empty = torch.empty(size, dtype=torch.float32, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)

    def prepare(self) -> None:
        """Called once, after the checkpoint's weight is in place."""
        self.weight.add_(self.offset)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.eps)

    def add(self, residual: Tensor, change: Tensor, change_scale: float) -> tuple[Tensor, Tensor]:
        """residual + change * change_scale, and its norm."""
        return add_rms_norm(residual, change, self.weight, self.eps, change_scale=change_scale)
