"""One indexed assignment a cache."""

from torch import Tensor


def kv_cache_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    key_cache.flatten(0, 1)[slots] = key[written].to(key_cache.dtype)
    value_cache.flatten(0, 1)[slots] = value[written].to(value_cache.dtype)
