import pytest
import torch

from kernels.backends import Backend, available
from kernels.errors import KernelArgumentError
from kernels.kv_cache_write import kv_cache_write
from kernels.rotary import rotary
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


@pytest.mark.parametrize("backend", available())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("cache_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rotary_dim", [12, 6])
def test_equals_rotary_and_write_apart(backend, dtype, cache_dtype, rotary_dim, rng) -> None:
    arguments = make(rng, dtype, cache_dtype, rotary_dim)
    key_cache, value_cache = arguments["key_cache"].clone(), arguments["value_cache"].clone()
    before = arguments["query_key"].clone()
    rotated = rotary(arguments["query_key"], arguments["cos_sin"], backend=Backend.REFERENCE)
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
