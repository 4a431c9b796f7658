from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def empty_memory_is_nan() -> Iterator[None]:
    """`torch.empty` gives NaN, so that an op which forgets to write an element is caught."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(20240917)
