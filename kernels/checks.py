"""Argument checks of the public wrappers. A few microseconds each; no device is asked anything."""

import torch
from torch import Tensor

from kernels.errors import KernelArgumentError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_shape(name: str, tensor: Tensor, *dims: int | None) -> None:
    """`dims` are the expected sizes; None lets any size pass."""
    shape = tensor.shape
    if len(shape) == len(dims) and all(
        want is None or got == want for got, want in zip(shape, dims, strict=True)
    ):
        return
    expected = ", ".join("any" if want is None else str(want) for want in dims)
    raise KernelArgumentError(name, f"of shape {list(shape)}", f"[{expected}]")


def check_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        raise KernelArgumentError(name, tensor.dtype, " or ".join(map(str, dtypes)))


def check_device(device: torch.device, **tensors: Tensor) -> None:
    """All of `tensors` lie on `device`."""
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise KernelArgumentError(name, f"on {tensor.device}", device)


def check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise KernelArgumentError(name, f"strided {tensor.stride()}", "contiguous")


def check_last_dim_contiguous(name: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise KernelArgumentError(
            name, f"strided {tensor.stride(-1)} in its last dimension", "a stride of 1 there"
        )
