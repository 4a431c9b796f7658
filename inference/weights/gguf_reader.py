"""Reads GGUF files: metadata, and tensors as views of the mapped file. No torch.

A file is never trusted: every length, count and offset is checked against the file's size before it
is used, so that a broken or hostile file ends in ModelLoadError and never in a huge allocation.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from inference.errors import ModelLoadError

MAX_METADATA_ENTRIES = 65_536
MAX_TENSORS = 65_536
MAX_DIMS = 4
MAX_NAME_BYTES = 1_024
MAX_ARRAY_LENGTH = 8_000_000

# GGUF value type -> struct format; 8 is a string and 9 an array.
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9

# ggml type -> (name, elements in a block, bytes of a block)
GGML_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_OTHER_TYPES = {
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor, still encoded.

    `shape` is row-major: the last dimension is contiguous. `data` is a read-only uint8 view of the
    mapped file and keeps it mapped.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An opened file. Metadata arrays are lists of Python values."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Map a file and read its tables; tensor data is not touched.

    Raises:
        ModelLoadError: not a GGUF file, cut short, inconsistent, or of an unsupported kind.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelLoadError(f"{path} does not exist.") from None
    except (OSError, ValueError) as exc:
        raise ModelLoadError(f"{path} cannot be read: {exc}.") from exc
    return _Parser(path, mapped).parse()


class _Parser:
    """A cursor over the mapped file."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self._path = path
        self._mapped = mapped
        self._size = len(mapped)
        self._at = 0

    def parse(self) -> GGUFFile:
        if self._take(4) != b"GGUF":
            raise ModelLoadError(f"{self._path} is not a GGUF file.")
        version = self._scalar(4)
        if version not in (2, 3):
            raise self._refuse(f"version {version} is not supported; 2 and 3 are")
        num_tensors = self._count(MAX_TENSORS, "tensors")
        num_entries = self._count(MAX_METADATA_ENTRIES, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string(MAX_NAME_BYTES)
            if key in metadata:
                raise self._refuse(f"metadata {key!r} is given twice")
            metadata[key] = self._value(self._scalar(4))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 65_536:
            raise self._refuse(f"alignment {alignment!r} is out of range")
        data_start = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, type_id, shape, offset in infos:
            if name in tensors:
                raise self._refuse(f"tensor {name!r} is given twice")
            tensors[name] = self._tensor(name, type_id, shape, data_start + offset)
        return GGUFFile(self._path, metadata, tensors)

    def _refuse(self, why: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path} cannot be used: {why}.")

    def _take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > self._size:
            raise self._refuse(f"it ends at byte {self._size:,}, in the middle of a value")
        taken = self._mapped[self._at : end]
        self._at = end
        return taken

    def _scalar(self, type_id: int) -> Any:
        layout = _SCALARS[type_id]
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _count(self, limit: int, what: str) -> int:
        got = int(self._scalar(10))
        if got > limit:
            raise self._refuse(f"it claims {got:,} {what}; at most {limit:,} are allowed")
        return got

    def _string(self, limit: int) -> str:
        length = int(self._scalar(10))
        if length > min(limit, self._size - self._at):
            raise self._refuse(f"it claims a text of {length:,} bytes")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self._refuse("a text is not UTF-8") from None

    def _value(self, type_id: int) -> Any:
        if type_id in _SCALARS:
            return self._scalar(type_id)
        if type_id == _STRING:
            return self._string(self._size)
        if type_id == _ARRAY:
            return self._array()
        raise self._refuse(f"metadata of type {type_id} is unknown")

    def _array(self) -> list[Any]:
        type_id = int(self._scalar(4))
        length = self._count(MAX_ARRAY_LENGTH, "array elements")
        if type_id == _STRING:
            # A string takes at least its 8-byte length.
            if length * 8 > self._size - self._at:
                raise self._refuse(f"it claims an array of {length:,} texts")
            return [self._string(self._size) for _ in range(length)]
        if type_id not in _SCALARS:
            raise self._refuse(f"an array of type {type_id} is not supported")
        layout = _SCALARS[type_id][1]
        raw = self._take(length * struct.calcsize("<" + layout))
        return list(struct.unpack(f"<{length}{layout}", raw))

    def _tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string(MAX_NAME_BYTES)
        num_dims = int(self._scalar(4))
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._refuse(f"tensor {name!r} has {num_dims} dimensions")
        # The file gives the contiguous dimension first.
        shape = tuple(int(self._scalar(10)) for _ in range(num_dims))[::-1]
        return name, int(self._scalar(4)), shape, int(self._scalar(10))

    def _tensor(self, name: str, type_id: int, shape: tuple[int, ...], start: int) -> GGUFTensor:
        if type_id not in GGML_TYPES:
            kind = _OTHER_TYPES.get(type_id, f"type {type_id}")
            known = ", ".join(entry[0] for entry in GGML_TYPES.values())
            raise self._refuse(f"tensor {name!r} is stored as {kind}; supported are {known}")
        type_name, block_elements, block_bytes = GGML_TYPES[type_id]
        elements = math.prod(shape)
        if not elements or shape[-1] % block_elements:
            raise self._refuse(
                f"tensor {name!r} of shape {shape} is not made of {type_name} blocks"
            )
        num_bytes = elements // block_elements * block_bytes
        if start + num_bytes > self._size:
            raise self._refuse(
                f"tensor {name!r} would end at byte {start + num_bytes:,} of {self._size:,}; "
                "the file is cut short or broken"
            )
        data = np.frombuffer(self._mapped, dtype=np.uint8, count=num_bytes, offset=start)
        return GGUFTensor(name, type_name, shape, data)
