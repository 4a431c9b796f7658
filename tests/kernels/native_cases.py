"""Quantised groups and paged caches for tests of the compiled kernels."""

from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from kernels.native import library


def usable_kernels() -> tuple[str, ...]:
    """Every set of kernels that this processor can run; `avx2` and `portable` at least on x86."""
    library.load()
    return library.usable_kernels()


@dataclass(frozen=True)
class Groups:
    quants: Tensor
    scales: Tensor
    mins: Tensor | None
    # What they stand for, [n, k] float64.
    weight: Tensor

    def add_to(self, linear: Any) -> bool:
        added: bool = linear.add_groups(self.quants, self.scales, self.mins)
        return added


def random_groups(
    rng: torch.Generator, num_columns: int, depth: int, *, bits: int, with_mins: bool
) -> Groups:
    """Groups of 32 in the form of the side file, spread so that a row's sum is of size 1."""
    size = (num_columns, depth)
    scales = (torch.rand(num_columns, depth // 32, generator=rng) + 0.5) / (2**bits * depth**0.5)
    scales = (2 * scales).half()
    mins = (torch.randn(scales.shape, generator=rng) / depth**0.5).half() if with_mins else None
    if bits == 4:
        values = torch.randint(0, 16, size, generator=rng, dtype=torch.uint8)
        quants = values[:, 0::2] | (values[:, 1::2] << 4)
        centre = 8
    else:
        # -128 does not occur in Q8_0.
        values = torch.randint(1, 256, size, generator=rng, dtype=torch.int16).to(torch.uint8)
        quants = values
        centre = 128

    def spread(per_group: Tensor) -> Tensor:
        return per_group.double().repeat_interleave(32, dim=1)

    offset = spread(mins) if mins is not None else -centre * spread(scales)
    return Groups(quants, scales, mins, values.double() * spread(scales) + offset)


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
