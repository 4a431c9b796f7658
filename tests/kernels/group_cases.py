"""Random matrices in groups of 32, as a model folder has them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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
