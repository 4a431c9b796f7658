"""The formula in fp32, then one indexed assignment a cache."""

import torch
from torch import Tensor

from kernels import int8_kv


def rotary_kv_write(
    query_key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    rotary_dim = cos_sin.shape[1]
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, rotary_dim / 2]
    first, second = query_key[..., :rotary_dim].float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    heads = torch.cat([rotated.to(query_key.dtype), query_key[..., rotary_dim:]], dim=-1)
    num_heads = query_key.shape[1] - value.shape[1]
    query, key = heads[:, :num_heads], heads[:, num_heads:]
    if key_scales is not None and value_scales is not None:
        int8_kv.write(key, key_cache, key_scales, slot_mapping)
        int8_kv.write(value, value_cache, value_scales, slot_mapping)
        return query.contiguous()
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    key_cache.flatten(0, 1)[slots] = key[written].to(key_cache.dtype)
    value_cache.flatten(0, 1)[slots] = value[written].to(value_cache.dtype)
    return query.contiguous()
