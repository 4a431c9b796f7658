"""The formula, in fp32."""

from torch import Tensor


def rms_norm(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    values = hidden_states.float()
    mean_square = values.square().mean(dim=-1, keepdim=True)
    return (values * (mean_square + eps).rsqrt() * weight).to(hidden_states.dtype)


def add_rms_norm(
    residual: Tensor, change: Tensor, weight: Tensor, eps: float, change_scale: float
) -> tuple[Tensor, Tensor]:
    scaled = change if change_scale == 1.0 else change * change_scale
    summed = residual + scaled
    return summed, rms_norm(summed, weight, eps)
