"""Quantised groups beside a checkpoint's own weights, for linears of a GPU whose rows are few."""

import logging
from collections.abc import Iterable

import torch

from inference.errors import ModelLoadError
from inference.layers.linear import Linear
from inference.models.decoder import Decoder
from inference.weights.group_sizes import packed_bytes
from inference.weights.groups_file import GroupsFile, StoredBlocks, StoredGroups
from inference.weights.names import checkpoint_names
from kernels.quant_linear.packing import QuantWeight, pack, stack
from kernels.quant_linear.super_blocks import pack_super_blocks

logger = logging.getLogger(__name__)


def memory_of(groups: GroupsFile) -> int:
    """Bytes of all groups of a file together, packed; raises ModelLoadError."""
    return packed_bytes(groups.path) if groups.names else 0


def read_packed(
    groups: GroupsFile, names: Iterable[str], device: torch.device
) -> tuple[QuantWeight, ...]:
    """The checkpoint's matrices `names`, rows under rows, as one where they are of one form;
    nothing unless all are there."""
    with groups.refusals():
        found = [_packed(part, device) for part in groups.read(names)]
    if not found:
        return ()
    stacked = stack(found)
    return tuple(found) if stacked is None else (stacked,)


def _packed(part: StoredGroups | StoredBlocks, device: torch.device) -> QuantWeight:
    if isinstance(part, StoredBlocks):
        return pack_super_blocks(part.blocks.to(device), part.bits)
    mins = None if part.mins is None else part.mins.to(device)
    return pack(part.quants.to(device), part.scales.to(device), mins)


def add_groups(decoder: Decoder, groups: GroupsFile) -> int:
    """Give linears their groups beside the weights that are there; returns how many have them.

    Raises:
        ModelLoadError: the file is broken, or its matrices are of another shape.
    """
    count = 0
    linears = [(name, each) for name, each in decoder.named_modules() if isinstance(each, Linear)]
    for name, linear in linears:
        tied = linear.weight is decoder.embedding.weight
        parameter = "embedding.weight" if tied else f"{name}.weight"
        for stacked in (True, False):
            names = checkpoint_names(decoder.spec, parameter, stacked=stacked)
            linear.groups = linear.groups or read_packed(groups, names, linear.weight.device)
        if not linear.groups:
            continue
        num_columns, depth = linear.weight.shape
        if num_columns != sum(part.num_columns for part in linear.groups) or any(
            part.depth != depth for part in linear.groups
        ):
            raise ModelLoadError(f"{groups.path} has {parameter} in another shape than the model.")
        count += 1
    logger.info("%d of %d linears have quantised groups.", count, len(linears))
    return count
