"""The formula, in fp32."""

from torch import Tensor


def rms_norm(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    values = hidden_states.float()
    mean_square = values.square().mean(dim=-1, keepdim=True)
    return (values * (mean_square + eps).rsqrt() * weight).to(hidden_states.dtype)
