"""The k and v tensors that block ids point into."""

import torch
from torch import Tensor

from inference.config import ModelConfig


class KVCacheStorage:
    """Keys and values of all layers, in blocks. Owned by the engine thread.

    `key_cache`, `value_cache`: [num_layers, num_blocks, block_size, num_kv_heads, head_dim],
    contiguous. A layer's op takes `key_cache[layer]`.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (
            model_config.num_layers,
            num_blocks,
            block_size,
            model_config.num_kv_heads,
            model_config.head_dim,
        )
        # Zeros, not empty: a masked score times a NaN left in memory would still be NaN.
        self.key_cache: Tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.value_cache: Tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks of every layer, (source, destination) each; no chains in one call."""
        if not pairs:
            return
        sources, destinations = torch.tensor(pairs, device=self.device).T
        self.key_cache[:, destinations] = self.key_cache[:, sources]
        self.value_cache[:, destinations] = self.value_cache[:, sources]


def bytes_per_block(model_config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    numbers = model_config.num_layers * model_config.num_kv_heads * model_config.head_dim
    return 2 * numbers * block_size * dtype.itemsize
