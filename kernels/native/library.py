"""Loads the compiled library into torch and says which of its kernels can run here.

The library holds the same kernels for several instruction sets; a caller names one by id, as tests
do, or takes the first usable one.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch

from kernels.build import DEFAULT_CACHE_DIR, BuildFailed, ensure_library

# Kernels whose activations are bf16; their dense linears need oneDNN's bf16.
_BF16_KERNELS = frozenset({"amx", "avx512"})


class NativeUnavailable(Exception):
    """The compiled kernels cannot be used; the message is a plain reason."""


@cache
def load(cache_dir: Path = DEFAULT_CACHE_DIR) -> None:
    """Build if needed, and load. Once a process.

    Raises:
        NativeUnavailable: it cannot be built or loaded.
    """
    try:
        library = ensure_library(cache_dir)
    except BuildFailed as exc:
        raise NativeUnavailable(str(exc)) from exc
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as exc:
        raise NativeUnavailable(f"the library {library} cannot be loaded: {exc}") from exc


def usable_kernels() -> tuple[str, ...]:
    """Ids of the kernels that this processor can run, best first. Call `load` before."""
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    found: list[str] = torch.ops.blockhouse.usable_kernels()
    return tuple(name for name in found if has_bf16 or name not in _BF16_KERNELS)


def kernels_title(kernels: str) -> str:
    """For people: "AVX-512 BF16"."""
    title: str = torch.ops.blockhouse.kernels_title(kernels)
    return title


def take_threads(*, own: bool) -> None:
    """Move the calling thread's parallel work from torch to the library, where that is all of it.

    The threads of torch's own operations (the sampler's) would spin for milliseconds after each of
    them, on the cores that the next step needs. A step that calls oneDNN keeps torch's threads:
    `own` is false then.
    """
    if own:
        torch.ops.blockhouse.set_num_threads(torch.get_num_threads())
        torch.set_num_threads(1)
    else:
        torch.ops.blockhouse.set_num_threads(0)


def activations_dtype(kernels: str) -> torch.dtype:
    """The dtype between a step's operations."""
    return torch.bfloat16 if kernels in _BF16_KERNELS else torch.float32


def new_linear(kernels: str, num_columns: int, depth: int) -> Any:
    """An empty `Linear` of csrc/linear.h."""
    return torch.classes.blockhouse.Linear(kernels, num_columns, depth)


def new_model(kernels: str, *arguments: Any) -> Any:
    """A `NativeModel` of csrc/native_model.h without layers."""
    return torch.classes.blockhouse.NativeModel(kernels, *arguments)
