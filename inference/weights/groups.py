"""Quantised groups beside a checkpoint's own weights, for linears whose rows are few.

`quantized.safetensors` holds the matrices of the GGUF file that the folder was imported from as
they were there: groups of 32 (`gguf_dequantize.QuantGroups`), or blocks of 256 of the K formats.
"""

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from inference.errors import ModelLoadError
from inference.layers.linear import Linear
from inference.models.decoder import Decoder
from inference.weights.gguf_import import GROUPS_FORMAT
from inference.weights.names import checkpoint_names
from kernels.errors import KernelArgumentError
from kernels.quant_linear.packing import QuantWeight, pack, stack
from kernels.quant_linear.super_blocks import (
    SUPER_BLOCK_BITS,
    pack_super_blocks,
    packed_bytes,
)

logger = logging.getLogger(__name__)

_FILE = "quantized.safetensors"


class GroupsFile:
    """The groups of a model folder; none where it has no such file or one of a foreign format.

    Raises:
        ModelLoadError: the file is broken.
    """

    def __init__(self, model_dir: Path) -> None:
        self.path = model_dir / _FILE
        self._file: Any = None
        self._names: frozenset[str] = frozenset()
        if not self.path.exists():
            return
        with _refusals(self.path):
            opened: Any = safe_open(self.path, framework="pt")
            if (opened.metadata() or {}).get("format") == GROUPS_FORMAT:
                self._file, self._names = opened, frozenset(opened.keys())

    @property
    def num_bytes(self) -> int:
        """Memory of all groups together."""
        return sum(self._bytes_of(name) for name in self._names)

    def _bytes_of(self, name: str) -> int:
        part = self._file.get_slice(name)
        stored = math.prod(part.get_shape()) * (2 if part.get_dtype() == "F16" else 1)
        bits = next((bits for bits in SUPER_BLOCK_BITS if name.endswith(f".q{bits}_k")), None)
        return stored if bits is None else packed_bytes(stored, bits)

    def read(self, names: Iterable[str], device: torch.device) -> tuple[QuantWeight, ...]:
        """The checkpoint's matrices `names`, rows under rows, as one where they are of one form;
        nothing unless all are there."""
        with _refusals(self.path):
            parts = [self._read(name.removesuffix(".weight"), device) for name in names]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return ()
        stacked = stack(found)
        return tuple(found) if stacked is None else (stacked,)

    def _read(self, stem: str, device: torch.device) -> QuantWeight | None:
        for bits in SUPER_BLOCK_BITS:
            name = f"{stem}.q{bits}_k"
            if name in self._names:
                return pack_super_blocks(self._file.get_tensor(name).to(device), bits)
        if f"{stem}.quants" not in self._names:
            return None

        def part(name: str) -> torch.Tensor:
            found: torch.Tensor = self._file.get_tensor(f"{stem}.{name}")
            return found.to(device)

        has_mins = f"{stem}.mins" in self._names
        return pack(part("quants"), part("scales"), part("mins") if has_mins else None)


@contextlib.contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """What reading raises becomes an error of the model."""
    try:
        yield
    except (SafetensorError, OSError, KernelArgumentError) as exc:
        raise ModelLoadError(f"{path} cannot be read: {exc}") from exc


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
            linear.groups = linear.groups or groups.read(names, linear.weight.device)
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
