"""The k and v tensors that block ids point into, and how many blocks fit in memory."""

import contextlib
import math
import mmap
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor

from inference.config import EngineConfig, ModelConfig
from inference.device_copies import array_to_device
from inference.errors import NotEnoughMemory
from inference.kv_cache.sizing import kv_bytes_per_token

# Share of the memory left after the weights that the pool takes when nobody says otherwise.
CPU_MEMORY_SHARE = 0.25
CUDA_MEMORY_SHARE = 0.85
# On the CPU the pool is not made larger than this many requests of the longest context.
CPU_MAX_FULL_CONTEXTS = 64
# Fewer tokens than this (or than the context, if that is shorter) are no useful pool.
MIN_USEFUL_TOKENS = 256
_CONTROL_GROUP = Path("/sys/fs/cgroup")


class KVCacheStorage:
    """Keys and values of all layers, in blocks. Owned by the engine thread.

    `key_cache`, `value_cache`: [num_layers, num_blocks, block_size, num_kv_heads, head_dim],
    contiguous. A layer's op takes `key_cache[layer]`. With dtype int8 `key_scales`, `value_scales`:
    [num_layers, num_blocks, block_size, num_kv_heads] float32, else None; see kernels.int8_kv.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int = 0,
        num_spare: int = 0,
    ) -> None:
        """
        Args:
            capacity: on the CPU, blocks that it may be made as large as without moving: room in the
                address space, no memory.
            num_spare: blocks behind those of the pool, for what has no block yet.
        """
        self._num_spare = num_spare
        self.capacity = max(capacity, num_blocks) if device.type == "cpu" else num_blocks
        shape = (
            model_config.num_layers,
            self.capacity + num_spare,
            block_size,
            model_config.num_kv_heads,
            model_config.head_dim,
        )
        self.key_cache: Tensor = _zeros(shape, dtype, device)
        self.value_cache: Tensor = _zeros(shape, dtype, device)
        self.key_scales: Tensor | None = None
        self.value_scales: Tensor | None = None
        if dtype == torch.int8:
            self.key_scales = _zeros(shape[:-1], torch.float32, device)
            self.value_scales = _zeros(shape[:-1], torch.float32, device)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device

    def resize(self, num_blocks: int) -> bool:
        """Be this many blocks large; what lower blocks hold stays.

        Returns:
            Whether the tensors are others than before.

        Raises:
            NotEnoughMemory: nothing was changed.
        """
        if self.device.type == "cpu":
            if num_blocks > self.capacity:
                raise NotEnoughMemory(
                    f"the machine's memory holds at most {self.capacity:,} blocks beside the model"
                )
            for cache in self._tensors():
                _give_back(cache, num_blocks)
        else:
            self._reallocate(num_blocks)
        self.num_blocks = num_blocks
        return self.device.type != "cpu"

    def _reallocate(self, num_blocks: int) -> None:
        kept = min(num_blocks, self.num_blocks)
        moved = []
        try:
            for cache in self._tensors():
                shape = (cache.shape[0], num_blocks + self._num_spare, *cache.shape[2:])
                new = torch.zeros(shape, dtype=cache.dtype, device=self.device)
                new[:, :kept] = cache[:, :kept]
                moved.append(new)
        except torch.OutOfMemoryError as exc:
            raise NotEnoughMemory("the device has too little memory free for it") from exc
        self.key_cache, self.value_cache, *scales = moved
        if scales:
            self.key_scales, self.value_scales = scales
        self.capacity = num_blocks

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks of every layer, (source, destination) each; no chains in one call."""
        if not pairs:
            return
        sources, destinations = array_to_device(np.array(pairs).T, self.device)
        for cache in self._tensors():
            cache[:, destinations] = cache[:, sources]

    def copy_tokens(self, pairs: list[tuple[int, int]]) -> None:
        """Copy single tokens of every layer, (source, destination) slot each; no chains."""
        if not pairs:
            return
        sources, destinations = array_to_device(np.array(pairs).T, self.device)
        for cache in self._tensors():
            slots = cache.flatten(1, 2)  # a view
            slots[:, destinations] = slots[:, sources]

    @property
    def spare_blocks(self) -> range:
        """Ids of the blocks behind those of the pool."""
        return range(self.capacity, self.capacity + self._num_spare)

    def _tensors(self) -> list[Tensor]:
        scales = (self.key_scales, self.value_scales)
        return [self.key_cache, self.value_cache, *(each for each in scales if each is not None)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the CPU a mapping of its own: a block takes real memory when it is first written, and
    large pages where the system grants them. `torch.zeros` would touch all of it now."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    cache = torch.frombuffer(memory, dtype=dtype).view(shape)
    # Kept with the tensor, to give pages back.
    cache._memory = memory  # type: ignore[attr-defined]
    return cache


def _give_back(cache: Tensor, first_block: int) -> None:
    """Return the pages of all blocks from `first_block` on; they read as zeros afterwards."""
    memory = getattr(cache, "_memory", None)
    if memory is None:
        return
    layer_bytes = cache[0].numel() * cache.element_size()
    kept_bytes = layer_bytes // cache.shape[1] * first_block
    for layer in range(cache.shape[0]):
        start = -(-(layer * layer_bytes + kept_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (layer + 1) * layer_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            memory.madvise(mmap.MADV_DONTNEED, start, end - start)


def bytes_per_block(model_config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return block_size * kv_bytes_per_token(model_config, str(dtype).removeprefix("torch."))


def choose_num_blocks(
    config: EngineConfig,
    *,
    block_bytes: int,
    free_bytes: int,
    max_model_len: int,
    device: torch.device,
) -> int:
    """Blocks of the pool: as configured, or from memory.

    Args:
        block_bytes: bytes of one block over all layers.
        free_bytes: memory of the device that the weights leave.

    Raises:
        NotEnoughMemory: what is allowed or left holds no useful number of tokens.
    """
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
        if num_blocks * block_bytes > free_bytes:
            raise NotEnoughMemory(
                f"{num_blocks:,} KV blocks need {num_blocks * block_bytes / 1e9:.1f} GB, but only "
                f"{free_bytes / 1e9:.1f} GB are free. Set fewer blocks."
            )
        return num_blocks
    on_cpu = device.type == "cpu"
    share = CPU_MEMORY_SHARE if on_cpu else CUDA_MEMORY_SHARE
    allowed = config.kv_memory_bytes or int(max(free_bytes, 0) * share)
    num_blocks = min(allowed, free_bytes) // block_bytes
    blocks_per_context = -(-max_model_len // config.block_size)
    if on_cpu and config.kv_memory_bytes is None:
        num_blocks = min(num_blocks, CPU_MAX_FULL_CONTEXTS * blocks_per_context)
    needed = min(-(-MIN_USEFUL_TOKENS // config.block_size), blocks_per_context)
    if num_blocks < needed:
        raise NotEnoughMemory(
            f"The KV pool may take {allowed / 1e6:,.0f} MB and {max(free_bytes, 0) / 1e6:,.0f} MB "
            f"are free, but {needed * block_bytes / 1e6:,.0f} MB are the least that is useful. "
            "Free memory, allow the pool more, or take a smaller model."
        )
    return num_blocks


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on `device`; on the CPU the container's limit counts too."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    free = int(psutil.virtual_memory().available)
    limit = _control_group_number("memory.max")
    used = _control_group_number("memory.current")
    if limit is not None and used is not None:
        # File cache counts as used there but is given back when needed.
        free = min(free, max(limit - used, 0) + (_control_group_cache() or 0))
    return free


def _control_group_number(name: str) -> int | None:
    try:
        return int((_CONTROL_GROUP / name).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _control_group_cache() -> int | None:
    try:
        lines = (_CONTROL_GROUP / "memory.stat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, ValueError, StopIteration, IndexError):
        return None
