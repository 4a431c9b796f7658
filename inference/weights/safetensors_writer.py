"""Writes a safetensors file tensor by tensor: a model need not fit memory twice. No torch."""

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

_DTYPE_BYTES = {"BF16": 2, "F16": 2, "U8": 1, "F32": 4}


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor to write. `chunks` gives its values in order, as pieces of any size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[npt.NDArray[np.generic]]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _DTYPE_BYTES[self.dtype]


def write_safetensors(
    path: Path,
    plans: Iterable[TensorPlan],
    metadata: Mapping[str, str],
    on_tensor: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write and flush to disk. `on_tensor` gets the size of each tensor when it is written."""
    plans = list(plans)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for plan in plans:
        end = offset + plan.num_bytes
        header[plan.name] = {
            "dtype": plan.dtype,
            "shape": list(plan.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for plan in plans:
            before = file.tell()
            for chunk in plan.chunks():
                file.write(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data)
            written = file.tell() - before
            assert written == plan.num_bytes, f"{plan.name}: {written} of {plan.num_bytes} bytes"
            on_tensor(written)
        file.flush()
        os.fsync(file.fileno())
