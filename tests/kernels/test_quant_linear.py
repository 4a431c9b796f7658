import pytest
import torch

from kernels.backends import Backend, available
from kernels.errors import KernelArgumentError
from kernels.quant_linear import MAX_ROWS, quant_linear
from kernels.quant_linear.packing import pack, stack, unpack
from kernels.quant_linear.super_blocks import pack_super_blocks
from tests.kernels.group_cases import Groups, random_groups
from tests.kernels.native_cases import random_super_blocks

FORMS = [(4, False), (4, True), (8, False)]
BACKENDS = [each for each in available() if each is not Backend.CPU]  # it is the reference there


def packed(groups: Groups):
    return pack(groups.quants, groups.scales, groups.mins)


@pytest.mark.parametrize(("bits", "with_mins"), FORMS)
@pytest.mark.parametrize("depth", [96, 128], ids=["odd", "even"])
def test_packing_keeps_every_number(bits, with_mins, depth, rng) -> None:
    groups = random_groups(rng, 20, depth, bits=bits, with_mins=with_mins)
    weight = packed(groups)
    assert (weight.num_columns, weight.depth, weight.bits) == (20, depth, bits)
    torch.testing.assert_close(unpack(weight), groups.weight.float(), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("bits", "with_mins"), FORMS)
@pytest.mark.parametrize(("num_rows", "num_columns", "depth"), [(1, 80, 256), (19, 33, 96)])
def test_sums_are_exact_but_for_one_rounding(
    backend, dtype, bits, with_mins, num_rows, num_columns, depth, rng
) -> None:
    groups = random_groups(rng, num_columns, depth, bits=bits, with_mins=with_mins)
    inputs = torch.randn(num_rows, depth, generator=rng).to(dtype)
    bias = torch.randn(num_columns, generator=rng).to(dtype)
    got = quant_linear(inputs, packed(groups), bias, backend=backend)
    want = inputs.double() @ groups.weight.T + bias.double()
    assert got.dtype == dtype
    tolerance = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), want, atol=3e-5, rtol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("bits", "with_mins"), FORMS)
def test_each_weight_is_the_checkpoints_own(backend, bits, with_mins, rng) -> None:
    """One input of 1 picks a weight: scale times whole number plus min, rounded once."""
    groups = random_groups(rng, 70, 160, bits=bits, with_mins=with_mins)
    weight = packed(groups)
    whole = torch.eye(160, dtype=torch.float16)
    got = [quant_linear(part, weight, backend=backend) for part in whole.split(MAX_ROWS)]
    assert torch.equal(torch.cat(got).T, groups.weight.float().half())


@pytest.mark.parametrize("backend", BACKENDS)
def test_takes_views_of_a_wider_tensor_and_changes_no_input(backend, rng) -> None:
    groups = random_groups(rng, 48, 64, bits=4, with_mins=True)
    wide = torch.randn(7, 150, generator=rng).bfloat16()
    before = wide.clone()
    got = quant_linear(wide[:, 50:114], packed(groups), backend=backend)
    want = wide[:, 50:114].double() @ groups.weight.T
    torch.testing.assert_close(got.double(), want, atol=3e-5, rtol=2**-8)
    assert torch.equal(wide, before)


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_super_blocks_keep_every_number(bits, rng) -> None:
    """Against the format's own library, which multiplies in fp32 too."""
    blocks = random_super_blocks(rng, 12, 512, bits=bits)
    weight = pack_super_blocks(blocks.blocks, bits)
    assert (weight.num_columns, weight.depth, weight.bits) == (12, 512, bits)
    torch.testing.assert_close(unpack(weight), blocks.weight.float(), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [4, 5, 6])
def test_super_blocks_multiply_exactly_but_for_one_rounding(backend, dtype, bits, rng) -> None:
    blocks = random_super_blocks(rng, 70, 256, bits=bits)
    inputs = torch.randn(3, 256, generator=rng).to(dtype)
    got = quant_linear(inputs, pack_super_blocks(blocks.blocks, bits), backend=backend)
    want = inputs.double() @ blocks.weight.T
    largest = float(want.abs().max())
    torch.testing.assert_close(got.double(), want, atol=3e-5 * largest, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "bits"),
    [
        ("bits", (2, 144), torch.uint8, 8),
        ("blocks", (2, 145), torch.uint8, 4),
        ("blocks", (2, 0), torch.uint8, 4),
        ("blocks", (288,), torch.uint8, 4),
        ("blocks", (2, 210), torch.int8, 6),
    ],
)
def test_bad_super_blocks_are_refused_by_name(name, shape, dtype, bits) -> None:
    with pytest.raises(KernelArgumentError) as refused:
        pack_super_blocks(torch.zeros(shape, dtype=dtype), bits)
    assert refused.value.argument == name


def test_matrices_of_one_form_stack_and_others_do_not(rng) -> None:
    parts = [random_groups(rng, size, 96, bits=4, with_mins=True) for size in (40, 16)]
    stacked = stack([packed(part) for part in parts])
    assert stacked is not None
    want = torch.cat([part.weight for part in parts]).float()
    torch.testing.assert_close(unpack(stacked), want, atol=1e-7, rtol=1e-6)
    for bits, with_mins in ((8, False), (4, False)):
        other = random_groups(rng, 16, 96, bits=bits, with_mins=with_mins)
        assert stack([packed(parts[0]), packed(other)]) is None


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("inputs", lambda t: t.float()),
        ("inputs", lambda t: t[:, :64]),
        ("inputs", lambda t: t[:0]),
        ("inputs", lambda t: t.repeat(40, 1)),
        ("inputs", lambda t: t.repeat(1, 2)[:, ::2]),
        ("weight", lambda t: t.to("meta")),
        ("bias", lambda t: t[1:]),
        ("bias", lambda t: t.half()),
        ("bias", lambda t: t.to("meta")),
    ],
)
def test_refuses_bad_arguments_by_name(name, spoil, rng) -> None:
    groups = random_groups(rng, 16, 96, bits=4, with_mins=False)
    arguments = {
        "inputs": torch.zeros(2, 96, dtype=torch.bfloat16),
        "bias": torch.zeros(16, dtype=torch.bfloat16),
    }
    changed = "inputs" if name == "weight" else name
    arguments[changed] = spoil(arguments[changed])
    with pytest.raises(KernelArgumentError) as refused:
        quant_linear(arguments["inputs"], packed(groups), arguments["bias"])
    assert refused.value.argument == name


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("quants", lambda t: t.to(torch.int8)),
        ("quants", lambda t: t[1:]),
        ("quants", lambda t: t[:, 1:]),
        ("scales", lambda t: t.float()),
        ("scales", lambda t: t[0]),
        ("mins", lambda t: t[:, 1:]),
        ("mins", lambda t: t.float()),
    ],
)
def test_packing_refuses_bad_arguments_by_name(name, spoil, rng) -> None:
    groups = random_groups(rng, 16, 96, bits=4, with_mins=True)
    arguments = {"quants": groups.quants, "scales": groups.scales, "mins": groups.mins}
    arguments[name] = spoil(arguments[name])
    with pytest.raises(KernelArgumentError) as refused:
        pack(**arguments)
    assert refused.value.argument == name
