"""The formula in fp32, then one indexed assignment a cache."""

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
    rotary_dim = cos_sin.shape[1]
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, rotary_dim / 2]
    first, second = query_key[..., :rotary_dim].float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    heads = torch.cat([rotated.to(query_key.dtype), query_key[..., rotary_dim:]], dim=-1)
    num_heads = query_key.shape[1] - value.shape[1]
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    key_cache.flatten(0, 1)[slots] = heads[written, num_heads:].to(key_cache.dtype)
    value_cache.flatten(0, 1)[slots] = value[written].to(value_cache.dtype)
    return heads[:, :num_heads].contiguous()
