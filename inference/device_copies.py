"""Copies between host and device that make nobody wait who need not."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class HostCopy:
    """A tensor on its way to the host.

    What is asked of the device after it was made is not waited for when it is read.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> list[Any]:
        """Its numbers, when they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[Any] = self._host.tolist()
        return numbers


def array_to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """One array; see `to_device`."""
    return to_device({"only": array}, device)["only"]


def to_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Tensors of the arrays' dtypes and shapes; to a GPU in one copy, which nobody waits for.

    The arrays lie back to back in pinned memory, each at a multiple of 16 bytes.
    """
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    starts = np.cumsum([0, *(-(-array.nbytes // 16) * 16 for array in arrays.values())]).tolist()
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    places = dict(zip(arrays, starts, strict=False))
    for name, array in arrays.items():
        place = packed.numpy()[places[name] : places[name] + array.nbytes]
        place[:] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    # The allocator keeps pinned memory until the copy is done.
    moved = packed.to(device, non_blocking=True)
    return {
        name: moved[places[name] : places[name] + array.nbytes]
        .view(torch.from_numpy(array).dtype)
        .view(array.shape)
        for name, array in arrays.items()
    }
