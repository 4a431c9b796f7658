"""Quantised groups beside a checkpoint's own weights, for linears whose rows are few.

`quantized.safetensors` holds the exact groups of the GGUF file that the folder was imported from
(`gguf_dequantize.QuantGroups`); its super-blocks are for the CPU's kernels alone.
"""

import contextlib
import logging
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
        """Memory of all groups together, at most."""
        return self.path.stat().st_size if self._names else 0

    def read(self, names: Iterable[str], device: torch.device) -> QuantWeight | None:
        """The checkpoint's matrices `names`, rows under rows; None unless all are there in one
        form."""
        stems = [name.removesuffix(".weight") for name in names]
        if not all(f"{stem}.quants" in self._names for stem in stems):
            return None
        with _refusals(self.path):
            return stack([self._read(stem, device) for stem in stems])

    def _read(self, stem: str, device: torch.device) -> QuantWeight:
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
        found = None
        for stacked in (True, False):
            if found is None:
                names = checkpoint_names(decoder.spec, parameter, stacked=stacked)
                found = groups.read(names, linear.weight.device)
        if found is None:
            continue
        if (found.num_columns, found.depth) != tuple(linear.weight.shape):
            raise ModelLoadError(
                f"{groups.path} has {parameter} as [{found.num_columns}, {found.depth}] instead of "
                f"{list(linear.weight.shape)}."
            )
        linear.groups = found
        count += 1
    logger.info("%d of %d linears have quantised groups.", count, len(linears))
    return count
