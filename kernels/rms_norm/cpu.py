"""PyTorch's own fused norm; fp32 inside."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = F.rms_norm(hidden_states.float(), weight.shape, weight, eps)
    return normed.to(hidden_states.dtype)
