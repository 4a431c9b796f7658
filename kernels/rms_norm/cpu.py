"""PyTorch's own fused norm; fp32 inside."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = F.rms_norm(hidden_states.float(), weight.shape, weight, eps)
    return normed.to(hidden_states.dtype)


def add_rms_norm(
    residual: Tensor, change: Tensor, weight: Tensor, eps: float, change_scale: float
) -> tuple[Tensor, Tensor]:
    scaled = change if change_scale == 1.0 else change * change_scale
    summed = residual + scaled
    return summed, rms_norm(summed, weight, eps)
