"""Writes both halves into one output, without concatenations; then row copies into the caches."""

import torch
from torch import Tensor


def rotary_kv_write(
    query_key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    heads = _rotated(query_key, cos_sin)
    num_heads = query_key.shape[1] - value.shape[1]
    key = heads[:, num_heads:]
    if slot_mapping.numel() and int(slot_mapping.min()) < 0:
        written = slot_mapping >= 0
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key.to(key_cache.dtype))
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value.to(value_cache.dtype))
    return heads[:, :num_heads]


def _rotated(heads: Tensor, cos_sin: Tensor) -> Tensor:
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, half]
    values = heads.float()
    first, second = values[..., :half], values[..., half : 2 * half]
    output = torch.empty(heads.shape, dtype=torch.float32, device=heads.device)
    torch.mul(first, cos, out=output[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=output[..., half : 2 * half]).addcmul_(first, sin)
    output[..., 2 * half :] = values[..., 2 * half :]
    return output.to(heads.dtype)
