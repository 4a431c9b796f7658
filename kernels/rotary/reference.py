"""The formula, in fp32."""

import torch
from torch import Tensor


def rotary(heads: Tensor, cos_sin: Tensor) -> Tensor:
    rotary_dim = cos_sin.shape[1]
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, rotary_dim / 2]
    first, second = heads[..., :rotary_dim].float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(heads.dtype), heads[..., rotary_dim:]], dim=-1)
