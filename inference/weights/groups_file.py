"""A model folder's `quantized.safetensors`: matrices as the imported GGUF file had them."""

import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from inference.errors import ModelLoadError
from inference.weights.header import GROUPS_FILE, GROUPS_FORMAT
from kernels.errors import KernelArgumentError
from kernels.quant_linear.super_blocks import SUPER_BLOCK_BITS

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredGroups:
    """One matrix in groups of 32: see `gguf_dequantize.QuantGroups`."""

    quants: Tensor
    scales: Tensor
    mins: Tensor | None


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """One matrix in GGUF's blocks of 256 (Q4_K, Q5_K, Q6_K), byte for byte."""

    blocks: Tensor
    bits: int


class GroupsFile:
    """The matrices of a model folder; none where it has no such file or one of a foreign format.

    Raises:
        ModelLoadError: the file is broken.
    """

    def __init__(self, model_dir: Path) -> None:
        self.path = model_dir / GROUPS_FILE
        self._file: Any = None
        self.names: frozenset[str] = frozenset()
        if not self.path.exists():
            return
        with self.refusals():
            opened: Any = safe_open(self.path, framework="pt")
            if (opened.metadata() or {}).get("format") != GROUPS_FORMAT:
                logger.warning("%s has an unknown format and is ignored.", self.path)
                return
            self._file, self.names = opened, frozenset(opened.keys())

    def read(self, weights: Iterable[str]) -> list[StoredGroups | StoredBlocks]:
        """The checkpoint's matrices of these names, in order; nothing unless all are there.

        Raises:
            ModelLoadError: the file is broken.
        """
        with self.refusals():
            parts = [self._read(name.removesuffix(".weight")) for name in weights]
        found = [part for part in parts if part is not None]
        return found if len(found) == len(parts) else []

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """What reading and packing raise becomes an error of the model."""
        try:
            yield
        except (SafetensorError, OSError, KernelArgumentError) as exc:
            raise ModelLoadError(f"{self.path} cannot be read: {exc}") from exc

    def _read(self, stem: str) -> StoredGroups | StoredBlocks | None:
        for bits in SUPER_BLOCK_BITS:
            if f"{stem}.q{bits}_k" in self.names:
                return StoredBlocks(self._file.get_tensor(f"{stem}.q{bits}_k"), bits)
        if f"{stem}.quants" not in self.names:
            return None
        has_mins = f"{stem}.mins" in self.names
        return StoredGroups(
            self._file.get_tensor(f"{stem}.quants"),
            self._file.get_tensor(f"{stem}.scales"),
            self._file.get_tensor(f"{stem}.mins") if has_mins else None,
        )
