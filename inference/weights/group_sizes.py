"""How much memory quantised groups take beside a model's weights, told from a header. No torch.

As a GPU's kernels keep them, which is not as the file has them: scales of GGUF's blocks of 256 are
worked out to fp32, numbers of 5 and 6 bits take a byte, and an odd number of groups has one of
zeros behind it (`kernels/quant_linear`).
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inference.errors import ModelLoadError
from inference.weights.header import read_header

_BLOCK = 256
# Of a block of 256 numbers, by the ending of its name: bytes in the file, and in memory: quants,
# then fp32 scales and mins of 8 groups, or scales of 16 groups.
_BLOCK_BYTES = {
    "q4_k": (144, _BLOCK // 2 + 4 * 2 * 8),
    "q5_k": (176, _BLOCK + 4 * 2 * 8),
    "q6_k": (210, _BLOCK + 4 * 16),
}
_ITEM_BYTES = {"U8": 1, "F16": 2}


def packed_bytes(path: Path) -> int:
    """Bytes of all matrices of a side file, packed for a GPU.

    Raises:
        ModelLoadError: the file is broken.
    """
    header = read_header(path)
    try:
        return sum(_bytes_of(header, name) for name in header)
    except (KeyError, TypeError, IndexError, ZeroDivisionError) as exc:
        raise ModelLoadError(f"{path} cannot be read: its parts do not fit together.") from exc


def _bytes_of(header: Mapping[str, Mapping[str, Any]], name: str) -> int:
    entry = header[name]
    stored: int = math.prod(entry["shape"]) * _ITEM_BYTES[entry["dtype"]]
    stem, _, part = name.rpartition(".")
    if part in _BLOCK_BYTES:
        in_file, in_memory = _BLOCK_BYTES[part]
        return stored // in_file * in_memory
    num_groups: int = header[f"{stem}.scales"]["shape"][1]
    return stored // num_groups * (num_groups + num_groups % 2)
