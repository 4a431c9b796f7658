"""One indexed assignment a cache."""

from torch import Tensor

from kernels import int8_kv


def kv_cache_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    if key_scales is not None and value_scales is not None:
        int8_kv.write(key, key_cache, key_scales, slot_mapping)
        int8_kv.write(value, value_cache, value_scales, slot_mapping)
        return
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    key_cache.flatten(0, 1)[slots] = key[written].to(key_cache.dtype)
    value_cache.flatten(0, 1)[slots] = value[written].to(value_cache.dtype)
