"""Linears of the compiled step, each set of kernels forced in turn."""

import platform

import pytest
import torch

from kernels.native import library
from tests.kernels.native_cases import (
    Groups,
    SuperBlocks,
    grouped_linear,
    random_groups,
    random_super_blocks,
    usable_kernels,
)

KERNELS = usable_kernels()
FORMATS = ["q4_1", "q4_0", "q8_0", "q4_k", "q5_k", "q6_k"]


def random_part(
    rng: torch.Generator, kind: str, num_columns: int, depth: int
) -> Groups | SuperBlocks:
    bits = int(kind[1])
    if kind.endswith("k"):
        return random_super_blocks(rng, num_columns, depth, bits=bits)
    return random_groups(rng, num_columns, depth, bits=bits, with_mins=kind == "q4_1")


def rows_of(rng: torch.Generator, kernels: str, num_rows: int, depth: int) -> torch.Tensor:
    rows = torch.randn(num_rows, depth, generator=rng).bfloat16()
    return rows.to(library.activations_dtype(kernels))


def rounds_weights(kernels: str, num_rows: int) -> bool:
    return library.activations_dtype(kernels) == torch.bfloat16 and num_rows > 32


def test_the_processor_runs_more_than_one_set_of_kernels_on_x86() -> None:
    assert KERNELS[-1] == "portable"
    assert len(set(KERNELS)) == len(KERNELS)
    if platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert "avx2" in KERNELS


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7, 16, 33, 70])
def test_groups_multiply_exactly_but_for_rounding_of_sums(rng, kernels, kind, num_rows) -> None:
    depth = 512 if kind.endswith("k") else 192
    groups = random_part(rng, kind, 64, depth)
    rows = rows_of(rng, kernels, num_rows, depth)
    got = grouped_linear(kernels, groups).run(rows, True)
    want = rows.double() @ groups.weight.T
    # Weights and inputs are exact in the products; only fp32 sums round. Past 32 rows kernels with
    # bf16 activations round the weights to bf16, as a dense bf16 model has them: 192 products, each
    # off by up to 2**-9.
    exact = not rounds_weights(kernels, num_rows)
    torch.testing.assert_close(got.double(), want, atol=3e-5 if exact else 3e-2, rtol=0)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("num_rows", [20, 40])
def test_columns_and_depth_that_fill_no_panel_are_all_multiplied(rng, kernels, num_rows) -> None:
    groups = random_part(rng, "q4_1", 96, 3200)
    rows = rows_of(rng, kernels, num_rows, 3200)
    want = rows.double() @ groups.weight.T
    atol = 3e-2 if rounds_weights(kernels, num_rows) else 1e-4
    got = grouped_linear(kernels, groups).run(rows, True)
    torch.testing.assert_close(got.double(), want, atol=atol, rtol=0)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_of_groups_does_not_depend_on_its_neighbours(rng, kernels, kind) -> None:
    linear = grouped_linear(kernels, random_part(rng, kind, 64, 256))
    rows = rows_of(rng, kernels, 32, 256)
    together = linear.run(rows, True)
    for count in (1, 2, 3, 5, 8, 9, 13, 16, 17, 31):
        assert torch.equal(linear.run(rows[:count], True), together[:count])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_stacked_matrices_may_be_quantised_in_different_ways(rng, kernels, num_rows) -> None:
    parts = [random_part(rng, kind, 32, 256) for kind in ("q4_k", "q8_0", "q6_k", "q4_1")]
    linear = grouped_linear(kernels, *parts)
    rows = rows_of(rng, kernels, num_rows, 256)
    want = rows.double() @ torch.cat([part.weight for part in parts]).T
    exact = not rounds_weights(kernels, num_rows)
    torch.testing.assert_close(
        linear.run(rows, True).double(), want, atol=3e-5 if exact else 3e-2, rtol=0
    )
    rounded = linear.run(rows, False)
    assert rounded.dtype == rows.dtype
    torch.testing.assert_close(rounded.double(), want, atol=3e-5 if exact else 3e-2, rtol=2**-8)


@pytest.mark.parametrize("kernels", KERNELS)
def test_one_declined_part_leaves_no_groups_at_all(rng, kernels) -> None:
    linear = library.new_linear(kernels, 64 + 12, 256)
    assert random_part(rng, "q4_k", 64, 256).add_to(linear)
    assert not random_part(rng, "q4_1", 12, 256).add_to(linear)
    assert not linear.groups_suffice()
    with pytest.raises(RuntimeError, match="without weights"):
        linear.run(rows_of(rng, kernels, 1, 256), True)


@pytest.mark.parametrize("kernels", KERNELS)
def test_few_rows_take_groups_and_many_the_faster_weights(rng, kernels) -> None:
    groups = random_groups(rng, 32, 64, bits=4, with_mins=True)
    linear = grouped_linear(kernels, groups)
    other = torch.randn(32, 64, generator=rng)
    linear.set_dense(other)
    rows = rows_of(rng, kernels, 600, 64)
    few, many = linear.run(rows[:4], True), linear.run(rows, True)
    torch.testing.assert_close(few.double(), rows[:4].double() @ groups.weight.T, atol=1e-4, rtol=0)
    weight = groups.weight.float() if linear.groups_suffice() else other
    dtype = library.activations_dtype(kernels)
    want = rows.float() @ weight.to(dtype).float().T
    # One rounding of the result to bf16, where activations are bf16.
    torch.testing.assert_close(
        many, want, atol=2e-2 if linear.groups_suffice() else 1e-4, rtol=2**-8
    )


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 31, 32, 33, 48, 100])
@pytest.mark.parametrize(("num_columns", "depth"), [(48, 64), (64, 2080), (80, 3200), (40, 50)])
def test_dense_weights(rng, kernels, num_rows, num_columns, depth) -> None:
    linear = library.new_linear(kernels, num_columns, depth)
    weight = torch.randn(num_columns, depth, generator=rng) / depth**0.5
    linear.set_dense(weight)
    rows = rows_of(rng, kernels, num_rows, depth)
    want = rows.double() @ weight.to(rows.dtype).double().T
    # fp32 sums; then a rounding to bf16 where oneDNN multiplies in it.
    torch.testing.assert_close(linear.run(rows, True).double(), want, atol=1e-5, rtol=2**-8)
    rounded = linear.run(rows, False)
    assert rounded.dtype == rows.dtype
    torch.testing.assert_close(rounded.double(), want, atol=1e-5, rtol=2**-8)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 16, 33, 100])
def test_dense_weights_that_bf16_holds_stay_exact_and_small(rng, kernels, num_rows) -> None:
    weight = torch.randn(64, 160, generator=rng).bfloat16() / 16
    linear = library.new_linear(kernels, 64, 160)
    linear.set_dense(weight.float())
    assert not linear.calls_torch()
    rows = rows_of(rng, kernels, num_rows, 160)
    want = rows.double() @ weight.double().T
    rounds = 0.0 if library.activations_dtype(kernels) == torch.float32 else 2**-8
    torch.testing.assert_close(linear.run(rows, True).double(), want, atol=1e-5, rtol=rounds)


@pytest.mark.parametrize("kernels", KERNELS)
def test_shapes_and_forms_outside_the_packed_form_are_declined(rng, kernels) -> None:
    narrow = random_groups(rng, 12, 64, bits=4, with_mins=True)
    linear = library.new_linear(kernels, 12, 64)
    assert not linear.add_groups(narrow.quants, narrow.scales, narrow.mins)
    with_mins = random_groups(rng, 32, 64, bits=8, with_mins=True)
    linear = library.new_linear(kernels, 32, 64)
    assert not linear.add_groups(with_mins.quants, with_mins.scales, with_mins.mins)
    blocks = random_super_blocks(rng, 12, 256, bits=4)
    assert not blocks.add_to(library.new_linear(kernels, 12, 256))


@pytest.mark.parametrize("kernels", KERNELS)
def test_eight_bits_of_minus_128_are_declined_or_exact(rng, kernels) -> None:
    groups = random_groups(rng, 32, 64, bits=8, with_mins=False)
    groups.quants[3, 5] = 0
    linear = library.new_linear(kernels, 32, 64)
    if linear.add_groups(groups.quants, groups.scales, None):
        groups.weight[3, 5] = -128 * groups.scales[3, 0].double()
        rows = rows_of(rng, kernels, 3, 64)
        want = rows.double() @ groups.weight.T
        torch.testing.assert_close(linear.run(rows, True).double(), want, atol=3e-5, rtol=0)
    else:
        assert library.activations_dtype(kernels) == torch.bfloat16


def test_groups_of_another_matrix_are_refused(rng) -> None:
    groups = random_groups(rng, 32, 64, bits=4, with_mins=True)
    linear = library.new_linear(KERNELS[0], 32, 64)
    with pytest.raises(RuntimeError, match="groups do not match a weight of"):
        linear.add_groups(groups.quants, groups.scales[:16], groups.mins)
    with pytest.raises(RuntimeError, match="float16 scales"):
        linear.add_groups(groups.quants, groups.scales.float(), groups.mins)
    blocks = random_super_blocks(rng, 32, 256, bits=4)
    with pytest.raises(RuntimeError, match="blocks do not match a weight of"):
        library.new_linear(KERNELS[0], 32, 256).add_super_blocks(blocks.blocks, 6)
    with pytest.raises(RuntimeError, match="4, 5 or 6 bits"):
        library.new_linear(KERNELS[0], 32, 256).add_super_blocks(blocks.blocks, 7)
    with pytest.raises(RuntimeError, match="weight is"):
        linear.set_dense(torch.zeros(64, 32))


def test_an_unknown_set_of_kernels_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no kernels named sse9"):
        library.new_linear("sse9", 32, 64)
