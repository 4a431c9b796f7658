"""What the hosts of the Triton kernels share. Imports no triton itself."""

import functools

import torch


def power_of_2(number: int) -> int:
    """The least power of 2 that is not below `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 elsewhere, which keeps the interpreter quick."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether tiles may take what sm_90 has more of than sm_80; true where there is no device."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)
