"""Weights in groups: from the forms of a model folder to the one that kernels read.

A model folder has a row's groups back to back (`inference.weights.gguf_dequantize.QuantGroups`). A
kernel's program takes some rows and goes along their groups: here the groups of all rows at one
place lie side by side, so what a program reads next is one run of memory.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.checks import check_device, check_dtype, check_shape
from kernels.errors import KernelArgumentError

GROUP = 32


@dataclass(frozen=True, slots=True)
class QuantWeight:
    """A matrix [num_columns, depth] with w = scale * (q - centre), or scale * q + min.

    An odd number of groups has one of zeros behind it.
    """

    # uint8 [num_groups, num_columns, group]; 4 bits [num_groups / 2, num_columns, group], even
    # groups in low nibbles and odd ones in high.
    quants: Tensor
    # [num_groups, num_columns] float16 or float32
    scales: Tensor
    mins: Tensor | None
    # That are used: 4, 5, 6 or 8.
    bits: int
    depth: int

    @property
    def group(self) -> int:
        """Numbers with one scale: 16 or 32."""
        return self.quants.shape[2]

    @property
    def num_columns(self) -> int:
        return self.scales.shape[1]

    @property
    def centre(self) -> int:
        """The stored number that stands for 0."""
        return 0 if self.mins is not None else 1 << (self.bits - 1)

    @property
    def nbytes(self) -> int:
        tensors = (self.quants, self.scales, self.mins)
        return sum(each.nbytes for each in tensors if each is not None)


def pack(quants: Tensor, scales: Tensor, mins: Tensor | None) -> QuantWeight:
    """
    Args:
        quants: uint8 [num_columns, depth / 2], the even one of two neighbours in the low nibble; or
            [num_columns, depth].
        scales: [num_columns, depth / 32] float16.
        mins: as `scales`, or None.

    Raises:
        KernelArgumentError: a shape, dtype or device is not as above.
    """
    check_shape("scales", scales, None, None)
    num_columns, num_groups = scales.shape
    depth = num_groups * GROUP
    check_shape("quants", quants, num_columns, None)
    if quants.shape[1] not in (depth // 2, depth):
        raise KernelArgumentError("quants", f"{quants.shape[1]} wide", f"{depth // 2} or {depth}")
    check_dtype("quants", quants, torch.uint8)
    check_dtype("scales", scales, torch.float16)
    check_device(quants.device, scales=scales)
    if mins is not None:
        check_shape("mins", mins, *scales.shape)
        check_dtype("mins", mins, torch.float16)
        check_device(quants.device, mins=mins)
    bits = 4 if quants.shape[1] < depth else 8
    if bits == 4:
        quants = torch.stack([quants & 15, quants >> 4], dim=-1)
    quants = groups_first(quants.reshape(num_columns, num_groups, GROUP))
    if bits == 4:
        quants = quants[0::2] | quants[1::2] << 4
    mins = None if mins is None else groups_first(mins)
    return QuantWeight(quants, groups_first(scales), mins, bits, depth)


def stack(weights: list[QuantWeight]) -> QuantWeight | None:
    """The matrices as one, rows under rows; None where they are quantised in different ways."""
    if len({(each.bits, each.depth, each.scales.dtype, each.mins is None) for each in weights}) > 1:
        return None
    mins = [each.mins for each in weights if each.mins is not None]
    return QuantWeight(
        torch.cat([each.quants for each in weights], dim=1),
        torch.cat([each.scales for each in weights], dim=1),
        torch.cat(mins, dim=1) if mins else None,
        weights[0].bits,
        weights[0].depth,
    )


def unpack(weight: QuantWeight) -> Tensor:
    """[num_columns, depth] float32."""
    quants = weight.quants
    if weight.bits == 4:
        quants = torch.stack([quants & 15, quants >> 4], dim=1).flatten(0, 1)
    numbers = (quants.float() - weight.centre) * weight.scales.float()[..., None]
    if weight.mins is not None:
        numbers += weight.mins.float()[..., None]
    return numbers.transpose(0, 1).flatten(1)[:, : weight.depth]


def groups_first(tensor: Tensor) -> Tensor:
    """[num_columns, num_groups, ...] -> [num_groups, num_columns, ...]; an even number of them."""
    moved = tensor.transpose(0, 1)
    return F.pad(moved, (0, 0) * (moved.dim() - 1) + (0, moved.shape[0] % 2)).contiguous()
