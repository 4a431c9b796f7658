import math

import pytest
import torch
from torch import Tensor

from kernels import int8_kv
from kernels.backends import Backend, available
from kernels.errors import KernelArgumentError
from kernels.kv_cache_write import kv_cache_write
from kernels.rotary_kv_write import rotary_kv_write

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def make(rng, dtype=torch.float32, cache_dtype=torch.float32, rotary_dim=12):
    """query_key and value as views of one wider tensor, angles, caches, slots with padding."""
    heads = torch.randn(5, 10, 12, generator=rng).to(dtype)
    angles = torch.rand(5, rotary_dim // 2, generator=rng) * 6
    return {
        "query_key": heads[:, :8],
        "value": heads[:, 8:],
        "cos_sin": torch.cat([angles.cos(), angles.sin()], dim=1),
        "key_cache": torch.randn(6, 4, 2, 12, generator=rng).to(cache_dtype),
        "value_cache": torch.randn(6, 4, 2, 12, generator=rng).to(cache_dtype),
        "slot_mapping": torch.tensor([23, -1, 9, 0, 4]),
    }


def turned(heads: Tensor, cos_sin: Tensor) -> Tensor:
    """The definition: pairs as complex numbers, fp32."""
    half = cos_sin.shape[1] // 2
    heads = heads.float()
    pairs = torch.complex(heads[..., :half], heads[..., half : 2 * half])
    pairs = pairs * torch.complex(cos_sin[:, None, :half], cos_sin[:, None, half:])
    return torch.cat([pairs.real, pairs.imag, heads[..., 2 * half :]], -1)


@pytest.mark.parametrize("backend", available())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("cache_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rotary_dim", [12, 6])
def test_equals_a_turn_of_pairs_and_a_write(backend, dtype, cache_dtype, rotary_dim, rng) -> None:
    arguments = make(rng, dtype, cache_dtype, rotary_dim)
    key_cache, value_cache = arguments["key_cache"].clone(), arguments["value_cache"].clone()
    before = arguments["query_key"].clone()
    rotated = turned(arguments["query_key"], arguments["cos_sin"]).to(dtype)
    kv_cache_write(
        rotated[:, 6:],
        arguments["value"],
        key_cache,
        value_cache,
        arguments["slot_mapping"],
        backend=Backend.REFERENCE,
    )
    query = rotary_kv_write(**arguments, backend=backend)
    # A product and a sum may be one operation on a device: one rounding of the result.
    tolerance = {"rtol": max(torch.finfo(dtype).eps, torch.finfo(cache_dtype).eps), "atol": 1e-6}
    torch.testing.assert_close(query, rotated[:, :6], **tolerance)
    torch.testing.assert_close(arguments["key_cache"], key_cache, **tolerance)
    assert torch.equal(arguments["value_cache"], value_cache)
    assert torch.equal(arguments["query_key"], before)


@pytest.mark.parametrize("backend", available())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rotary_dim", [12, 6])
def test_8_bits_hold_what_is_written(backend, dtype, rotary_dim, rng) -> None:
    arguments = make(rng, dtype, torch.float32, rotary_dim)
    caches = [torch.full((6, 4, 2, 12), 5, dtype=torch.int8) for _ in range(2)]
    scales = [torch.full((6, 4, 2), 7.0) for _ in range(2)]
    changes = dict(zip(("key_cache", "value_cache"), caches, strict=True))
    changes |= dict(zip(("key_scales", "value_scales"), scales, strict=True))
    query = rotary_kv_write(**(arguments | changes), backend=backend)
    rotated = turned(arguments["query_key"], arguments["cos_sin"]).to(dtype)
    eps = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(query, rotated[:, :6], rtol=eps, atol=1e-6)
    heads = (rotated[:, 6:], arguments["value"])
    for want, cache, scale in zip(heads, caches, scales, strict=True):
        slots = arguments["slot_mapping"]
        got = int8_kv.dequantise(cache.flatten(0, 1)[slots], scale.flatten(0, 1)[slots])
        # Half a step of its head, and the rounding of the rotation before it.
        step = want.float().abs().amax(dim=-1, keepdim=True) / 127
        close = (got - want.float()).abs() <= step * 0.51 + want.float().abs() * eps
        assert close[slots >= 0].all()
        rest = [slot for slot in range(24) if slot not in slots.tolist()]
        assert cache.flatten(0, 1)[rest].eq(5).all()
        assert scale.flatten(0, 1)[rest].eq(7.0).all()


@pytest.mark.parametrize("backend", available())
def test_scores_depend_on_distance_alone(backend, rng) -> None:
    heads = torch.randn(1, 2, 8, generator=rng)
    theta = torch.tensor([[math.pi / 3, 0.2, 0.03, 0.004]])

    def score(query_at: int, key_at: int) -> Tensor:
        rotated = []
        for position in (query_at, key_at):
            turn = theta * position
            cache = torch.zeros(2, 1, 1, 1, 8)
            query = rotary_kv_write(
                heads,
                heads[:, :1],
                torch.cat([turn.cos(), turn.sin()], 1),
                *cache,
                torch.tensor([0]),
                backend=backend,
            )
            rotated.append((query.flatten(), cache[0].flatten()))
        return rotated[0][0] @ rotated[1][1]

    torch.testing.assert_close(score(7, 4), score(107, 104), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("query_key", lambda t: t[:, :2]),
        ("query_key", lambda t: t.long()),
        ("query_key", lambda t: t[..., :10]),
        ("value", lambda t: t.half()),
        ("cos_sin", lambda t: t[:, :5]),
        ("cos_sin", lambda t: torch.cat([t, t], dim=1)),
        ("key_cache", lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)),
        ("value_cache", lambda t: t[:3]),
        ("slot_mapping", lambda t: t.int()),
        ("slot_mapping", lambda t: t.to("meta")),
    ],
)
def test_refuses_bad_arguments_by_name(name, spoil, rng) -> None:
    arguments = make(rng)
    arguments[name] = spoil(arguments[name])
    with pytest.raises(KernelArgumentError) as refused:
        rotary_kv_write(**arguments)
    assert refused.value.argument == name
