"""Writes both halves into one output, without concatenations."""

import torch
from torch import Tensor


def rotary(heads: Tensor, cos_sin: Tensor) -> Tensor:
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, half]
    values = heads.float()
    first, second = values[..., :half], values[..., half : 2 * half]
    output = torch.empty(heads.shape, dtype=torch.float32, device=heads.device)
    torch.mul(first, cos, out=output[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=output[..., half : 2 * half]).addcmul_(first, sin)
    output[..., 2 * half :] = values[..., 2 * half :]
    return output.to(heads.dtype)
