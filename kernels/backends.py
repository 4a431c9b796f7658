"""Which implementation of an op runs: the one place that asks what the machine has."""

import enum

import torch


class Backend(enum.StrEnum):
    # Pure PyTorch, short and obvious; every device. The oracle of the others.
    REFERENCE = "reference"
    # PyTorch arranged for speed on the CPU.
    CPU = "cpu"


def available() -> tuple[Backend, ...]:
    """Backends that can run on this machine."""
    return (Backend.REFERENCE, Backend.CPU)


def choose(device: torch.device) -> Backend:
    """The fastest backend for tensors on `device`."""
    return Backend.CPU if device.type == "cpu" else Backend.REFERENCE
