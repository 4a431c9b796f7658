import math

import pytest
import torch

from kernels.backends import available
from kernels.errors import KernelArgumentError
from kernels.rotary import rotary


def angles(num_tokens: int, half: int) -> torch.Tensor:
    return torch.arange(num_tokens)[:, None] * (10.0 ** -torch.arange(half))[None]


@pytest.mark.parametrize("backend", available())
@pytest.mark.parametrize("rotary_dim", [16, 10, 2])
def test_turns_pairs_as_complex_numbers(backend, rotary_dim, rng) -> None:
    half = rotary_dim // 2
    heads = torch.randn(6, 3, 16, generator=rng)
    before = heads.clone()
    theta = angles(6, half)
    got = rotary(heads, torch.cat([theta.cos(), theta.sin()], 1), backend=backend)
    turned = torch.complex(heads[..., :half], heads[..., half:rotary_dim]) * torch.polar(
        torch.ones_like(theta), theta
    ).unsqueeze(1)
    want = torch.cat([turned.real, turned.imag, heads[..., rotary_dim:]], -1)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
    assert torch.equal(heads, before)


@pytest.mark.parametrize("backend", available())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision_views_are_rounded_once(backend, dtype, tolerance, rng) -> None:
    wide = torch.randn(4, 5, 8, generator=rng).to(dtype)
    theta = angles(4, 4)
    cos_sin = torch.cat([theta.cos(), theta.sin()], 1)
    got = rotary(wide[:, :3], cos_sin, backend=backend)
    want = rotary(wide[:, :3].float(), cos_sin, backend=backend)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want, atol=1e-6, rtol=tolerance)


@pytest.mark.parametrize("backend", available())
def test_scores_depend_on_distance_alone(backend, rng) -> None:
    query, key = torch.randn(2, 1, 1, 8, generator=rng)
    theta = torch.tensor([[math.pi / 3, 0.2, 0.03, 0.004]])

    def at(position: int, head: torch.Tensor) -> torch.Tensor:
        turn = theta * position
        return rotary(head, torch.cat([turn.cos(), turn.sin()], 1), backend=backend).flatten()

    near = at(7, query) @ at(4, key)
    far = at(107, query) @ at(104, key)
    torch.testing.assert_close(near, far, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("heads", "cos_sin", "name"),
    [
        (torch.zeros(2, 8), torch.zeros(2, 8), "heads"),
        (torch.zeros(2, 1, 8).long(), torch.zeros(2, 8), "heads"),
        (torch.zeros(2, 8, 3).transpose(1, 2), torch.zeros(2, 8), "heads"),
        (torch.zeros(2, 1, 8), torch.zeros(3, 8), "cos_sin"),
        (torch.zeros(2, 1, 8), torch.zeros(2, 10), "cos_sin"),
        (torch.zeros(2, 1, 8), torch.zeros(2, 7), "cos_sin"),
        (torch.zeros(2, 1, 8), torch.zeros(2, 8).half(), "cos_sin"),
        (torch.zeros(2, 1, 8), torch.zeros(2, 8, device="meta"), "cos_sin"),
    ],
)
def test_refuses_bad_arguments_by_name(heads, cos_sin, name) -> None:
    with pytest.raises(KernelArgumentError) as refused:
        rotary(heads, cos_sin)
    assert refused.value.argument == name
