"""Which implementation of an op runs: the one place that asks what the machine has."""

import enum
import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch


class Backend(enum.StrEnum):
    # Pure PyTorch, short and obvious; every device. The oracle of the others.
    REFERENCE = "reference"
    # PyTorch arranged for speed on the CPU.
    CPU = "cpu"
    # Triton on a CUDA device; on the CPU only in Triton's interpreter, which is for tests.
    TRITON = "triton"


def available(device: torch.device | None = None) -> tuple[Backend, ...]:
    """Backends that can run on tensors of `device`, the CPU when it is None."""
    if device is not None and device.type == "cuda":
        return (Backend.REFERENCE, Backend.TRITON) if has_triton() else (Backend.REFERENCE,)
    if is_interpreting():
        return (Backend.REFERENCE, Backend.CPU, Backend.TRITON)
    return (Backend.REFERENCE, Backend.CPU)


def choose(device: torch.device) -> Backend:
    """The fastest backend for tensors on `device`."""
    if device.type == "cpu":
        return Backend.CPU
    if device.type == "cuda" and has_triton():
        return Backend.TRITON
    return Backend.REFERENCE


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed. Does not import it."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def is_interpreting() -> bool:
    """Whether Triton kernels run as Python on the CPU; decided when Triton is first imported."""
    if not has_triton():
        return False
    knobs = importlib.import_module("triton").knobs
    return bool(knobs.runtime.interpret)


def lazily(module: str, function: str) -> Callable[..., Any]:
    """`function` of `module`, which is imported at the first call."""

    @functools.cache
    def load() -> Callable[..., Any]:
        loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
        return loaded

    def call(*args: Any, **kwargs: Any) -> Any:
        return load()(*args, **kwargs)

    return call
