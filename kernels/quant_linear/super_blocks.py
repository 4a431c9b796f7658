"""GGUF's blocks of 256 numbers (Q4_K, Q5_K, Q6_K) as groups, exactly.

A block has fp16 numbers that its groups' small whole ones are multiplied with: their products are
kept as fp32 scales, which hold them. Numbers of 5 and 6 bits take a byte.
"""

import torch
from torch import Tensor

from kernels.checks import check_dtype, check_shape
from kernels.errors import KernelArgumentError
from kernels.quant_linear.packing import QuantWeight, groups_first

BLOCK = 256
# Bytes of a block, by bits.
_SIZES = {4: 144, 5: 176, 6: 210}
SUPER_BLOCK_BITS = tuple(_SIZES)


def pack_super_blocks(blocks: Tensor, bits: int) -> QuantWeight:
    """
    Args:
        blocks: uint8 [num_columns, depth / 256 * bytes of a block], as a GGUF file has them.
        bits: 4, 5 or 6.

    Raises:
        KernelArgumentError: a shape or dtype is not as above.
    """
    if bits not in _SIZES:
        raise KernelArgumentError("bits", bits, "4, 5 or 6")
    check_shape("blocks", blocks, None, None)
    check_dtype("blocks", blocks, torch.uint8)
    num_columns, width = blocks.shape
    if width == 0 or width % _SIZES[bits]:
        raise KernelArgumentError("blocks", f"{width} wide", f"a multiple of {_SIZES[bits]}")
    whole = blocks.reshape(num_columns, -1, _SIZES[bits])
    make = {4: _of_4_bits, 5: _of_5_bits, 6: _of_6_bits}[bits]
    quants, scales, mins = make(whole)
    return QuantWeight(
        groups_first(quants.flatten(1, 2)),
        groups_first(scales.flatten(1, 2)),
        None if mins is None else groups_first(mins.flatten(1, 2)),
        bits,
        whole.shape[1] * BLOCK,
    )


def _of_4_bits(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[num_columns, num_blocks, groups of a block, ...] of each; quants are pairs of groups."""
    scales, mins = _scales_and_mins(blocks)
    # A run of 32 bytes is a pair of groups already.
    return _rows(blocks[..., 16:], 4, 32), scales, mins


def _of_5_bits(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales, mins = _scales_and_mins(blocks)
    low = _rows(blocks[..., 48:], 4, 32)
    low = torch.stack([low & 15, low >> 4], dim=-2).flatten(-3, -2)
    # Bit g of byte l is the fifth bit of number l in group g.
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    high = (blocks[..., None, 16:48] >> shifts) & 1
    return low | high << 4, scales, mins


def _of_6_bits(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    """Groups of 16, around 32."""
    low = _rows(blocks[..., :128], 2, 2, 32)
    # Quarters 0 and 1 of a half are low nibbles, 2 and 3 the high ones.
    low = torch.cat([low & 15, low >> 4], dim=-2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = (_rows(blocks[..., 128:192], 2, 1, 32) >> shifts) & 3
    quants = _rows((low | high << 4).flatten(-3), 16, 16)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return quants, scales * _half(blocks, 208), None


def _scales_and_mins(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [num_columns, num_blocks, 8] each, from twelve bytes of 6-bit numbers."""
    first, second, third = torch.split(blocks[..., 4:16], 4, dim=-1)
    scales = torch.cat([first & 63, (third & 15) | (first >> 6) << 4], dim=-1)
    mins = torch.cat([second & 63, (third >> 4) | (second >> 6) << 4], dim=-1)
    return scales.float() * _half(blocks, 0), mins.float() * -_half(blocks, 2)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at a byte of each block, as fp32 [num_columns, num_blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _rows(tensor: Tensor, *sizes: int) -> Tensor:
    """The last dimension in several of these sizes."""
    return tensor.reshape(*tensor.shape[:-1], *sizes)
