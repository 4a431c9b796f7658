"""Quantised groups and paged caches for tests of the compiled kernels."""

from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from kernels.native import library
from tests.kernels.group_cases import Groups, random_groups

__all__ = [
    "Groups",
    "grouped_linear",
    "random_groups",
    "random_super_blocks",
    "usable_kernels",
]


def usable_kernels() -> tuple[str, ...]:
    """Every set of kernels that this processor can run; `avx2` and `portable` at least on x86."""
    library.load()
    return library.usable_kernels()


@dataclass(frozen=True)
class SuperBlocks:
    """One matrix in GGUF's Q4_K, Q5_K or Q6_K."""

    blocks: Tensor
    bits: int
    # What they stand for according to the format's own library, [n, k] float64.
    weight: Tensor

    def add_to(self, linear: Any) -> bool:
        added: bool = linear.add_super_blocks(self.blocks, self.bits)
        return added


def random_super_blocks(
    rng: torch.Generator, num_columns: int, depth: int, *, bits: int
) -> SuperBlocks:
    """Any bytes are valid blocks; only the fp16 scales are kept small and finite."""
    kind = gguf.GGMLQuantizationType[f"Q{bits}_K"]
    num_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    shape = (num_columns, depth // 256, num_bytes)
    blocks = torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8).numpy()
    for at in (208,) if bits == 6 else (0, 2):
        small = torch.rand(shape[:2], generator=rng) / (1000 * depth**0.5)
        blocks[..., at : at + 2] = small.half().numpy()[..., None].view(np.uint8)
    blocks = blocks.reshape(num_columns, -1)
    weight = torch.from_numpy(gguf.quants.dequantize(blocks, kind)).double()
    return SuperBlocks(torch.from_numpy(blocks), bits, weight)


def grouped_linear(kernels: str, *parts: Groups | SuperBlocks) -> Any:
    """Matrices stacked into one linear."""
    columns = sum(len(part.weight) for part in parts)
    linear = library.new_linear(kernels, columns, parts[0].weight.shape[1])
    for part in parts:
        assert part.add_to(linear)
    return linear
