"""What a safetensors file says of itself, without its tensors. No torch.

Format: 8 bytes of length, little-endian, then that many bytes of JSON: name -> dtype, shape and
offsets (https://github.com/huggingface/safetensors).
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from inference.errors import ModelLoadError

MAX_HEADER_BYTES = 100_000_000

# Quantised matrices as an imported GGUF file had them, beside a folder's own weights; and the form
# that its metadata names.
GROUPS_FILE = "quantized.safetensors"
GROUPS_FORMAT = "blockhouse-groups-32-v1"


def read_header(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Tensor name -> its entry.

    Raises:
        ModelLoadError: the file is broken or cut short.
    """
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, num_bytes - 8):
            raise ModelLoadError(f"{path} is broken: its header claims {length:,} bytes.")
        text = file.read(length)
    try:
        header = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        ends = [int(entry["data_offsets"][1]) for entry in header.values()]
    except (ValueError, AttributeError, KeyError, IndexError, TypeError, RecursionError) as exc:
        raise ModelLoadError(f"{path} is broken: its header cannot be read.") from exc
    if max(ends, default=0) != num_bytes - 8 - length:
        raise ModelLoadError(f"{path} is broken or cut short: its header does not match its size.")
    return header


def num_elements(paths: Iterable[Path]) -> int:
    """Numbers in all tensors of these files.

    Raises:
        ModelLoadError: a file is broken.
    """
    try:
        return sum(
            math.prod(entry["shape"]) for path in paths for entry in read_header(path).values()
        )
    except (KeyError, TypeError) as exc:
        raise ModelLoadError("A safetensors header has a tensor without a shape.") from exc
