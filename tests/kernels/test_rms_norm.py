import pytest
import torch

from kernels.backends import Backend, available
from kernels.errors import KernelArgumentError
from kernels.rms_norm import add_rms_norm, rms_norm


@pytest.mark.parametrize("backend", available())
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 64)], ids=str)
def test_equals_the_definition(backend, shape, rng) -> None:
    hidden = torch.randn(shape, generator=rng) * 3
    weight = torch.randn(shape[-1], generator=rng)
    exact = hidden.double()
    want = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    before = hidden.clone()
    got = rms_norm(hidden, weight, 1e-5, backend=backend)
    torch.testing.assert_close(got, want.float(), atol=1e-6, rtol=1e-6)
    assert torch.equal(hidden, before)


@pytest.mark.parametrize("backend", available())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision_is_rounded_once(backend, dtype, tolerance, rng) -> None:
    hidden = torch.randn(4, 96, generator=rng).to(dtype)
    weight = torch.randn(96, generator=rng)
    got = rms_norm(hidden, weight, 1e-6, backend=backend)
    assert got.dtype == dtype
    want = rms_norm(hidden.float(), weight, 1e-6, backend=backend)
    torch.testing.assert_close(got.float(), want, atol=1e-7, rtol=tolerance)


@pytest.mark.parametrize("backend", available())
def test_zeros_stay_zeros(backend) -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


@pytest.mark.parametrize(
    ("hidden", "weight", "name"),
    [
        (torch.zeros(2, 8, dtype=torch.int64), torch.ones(8), "hidden_states"),
        (torch.zeros(2, 8), torch.ones(7), "weight"),
        (torch.zeros(2, 8), torch.ones(8).half(), "weight"),
        (torch.zeros(2, 8), torch.ones(8, device="meta"), "weight"),
    ],
)
def test_refuses_bad_arguments_by_name(hidden, weight, name) -> None:
    with pytest.raises(KernelArgumentError) as refused:
        rms_norm(hidden, weight, 1e-6)
    assert refused.value.argument == name


@pytest.mark.parametrize("backend", available())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_norm_of_a_sum_equals_sum_then_norm(backend, dtype, scale, rng) -> None:
    residual = (torch.randn(3, 40, generator=rng) * 4).to(dtype)
    change = torch.randn(3, 40, generator=rng).to(dtype)
    weight = torch.randn(40, generator=rng)
    before = residual.clone(), change.clone()
    summed, normed = add_rms_norm(
        residual, change, weight, 1e-5, change_scale=scale, backend=backend
    )
    want = residual + (change if scale == 1.0 else change * scale)
    assert torch.equal(summed, want)
    want_normed = rms_norm(want, weight, 1e-5, backend=Backend.REFERENCE)
    torch.testing.assert_close(normed, want_normed, atol=1e-6, rtol=torch.finfo(dtype).eps)
    assert torch.equal(residual, before[0])
    assert torch.equal(change, before[1])


@pytest.mark.parametrize("backend", available())
def test_takes_heads_that_are_a_view(backend, rng) -> None:
    wide = torch.randn(3, 5, 16, generator=rng)
    weight = torch.randn(16, generator=rng)
    got = rms_norm(wide[:, 1:4], weight, 1e-5, backend=backend)
    want = rms_norm(wide[:, 1:4].contiguous(), weight, 1e-5, backend=Backend.REFERENCE)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda a: a | {"residual": a["residual"].long()}, "residual"),
        (lambda a: a | {"change": a["change"].half()}, "change"),
        (lambda a: a | {"change": a["change"][:1]}, "change"),
        (lambda a: a | {"weight": a["weight"][:7]}, "weight"),
    ],
)
def test_norm_of_a_sum_refuses_bad_arguments_by_name(spoil, name) -> None:
    good = {"residual": torch.zeros(2, 8), "change": torch.zeros(2, 8), "weight": torch.ones(8)}
    with pytest.raises(KernelArgumentError) as refused:
        add_rms_norm(**spoil(good), eps=1e-6)
    assert refused.value.argument == name
