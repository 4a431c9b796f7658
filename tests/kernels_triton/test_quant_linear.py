import pytest
import torch

from kernels.backends import Backend
from kernels.quant_linear import packing, quant_linear, triton_quant_linear
from kernels.quant_linear.triton_quant_linear import choose_num_splits
from tests.kernels.group_cases import random_groups


@pytest.mark.parametrize("num_splits", [1, 2, 4])
@pytest.mark.parametrize(("bits", "with_mins"), [(4, True), (8, False)])
def test_a_depth_split_in_any_number_gives_the_same(
    num_splits, bits, with_mins, rng, monkeypatch
) -> None:
    """Five pairs of groups, the last one half: splits of unlike length, one without any."""
    monkeypatch.setattr(triton_quant_linear, "choose_num_splits", lambda *sizes: num_splits)
    groups = random_groups(rng, 70, 288, bits=bits, with_mins=with_mins)
    inputs = torch.randn(3, 288, generator=rng).half()
    bias = torch.randn(70, generator=rng).half()
    weight = packing.pack(groups.quants, groups.scales, groups.mins)
    got = quant_linear(inputs, weight, bias, backend=Backend.TRITON)
    want = inputs.double() @ groups.weight.T + bias.double()
    torch.testing.assert_close(got.double(), want, atol=3e-5, rtol=2**-10)


def test_splits_fill_the_device_and_leave_each_some_depth() -> None:
    processors = 132
    assert choose_num_splits(448, 64, processors) == 1  # gate and up of an 8B model
    assert choose_num_splits(96, 64, processors) == 2
    assert choose_num_splits(64, 224, processors) == 4
    assert choose_num_splits(9, 9, processors) == 2  # few groups
    assert choose_num_splits(9, 3, processors) == 1
    assert choose_num_splits(1, 1000, processors) == 16
