import pytest
import torch

from kernels.backends import available
from kernels.errors import KernelArgumentError
from kernels.kv_cache_write import kv_cache_write


def make(rng, dtype=torch.float32, cache_dtype=torch.float32):
    key = torch.randn(5, 2, 8, generator=rng).to(dtype)
    value = torch.randn(5, 2, 8, generator=rng).to(dtype)
    key_cache = torch.randn(6, 4, 2, 8, generator=rng).to(cache_dtype)
    value_cache = torch.randn(6, 4, 2, 8, generator=rng).to(cache_dtype)
    return key, value, key_cache, value_cache, torch.tensor([23, 0, 9, 10, 4])


@pytest.mark.parametrize("backend", available())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_writes_the_slots_and_nothing_else(backend, dtype, cache_dtype, rng) -> None:
    key, value, key_cache, value_cache, slots = make(rng, dtype, cache_dtype)
    before = key_cache.clone(), value_cache.clone()
    kv_cache_write(key, value, key_cache, value_cache, slots, backend=backend)
    for block in range(6):
        for offset in range(4):
            slot = block * 4 + offset
            if slot in slots.tolist():
                token = slots.tolist().index(slot)
                assert torch.equal(key_cache[block, offset], key[token].to(cache_dtype))
                assert torch.equal(value_cache[block, offset], value[token].to(cache_dtype))
            else:
                assert torch.equal(key_cache[block, offset], before[0][block, offset])
                assert torch.equal(value_cache[block, offset], before[1][block, offset])


@pytest.mark.parametrize("backend", available())
def test_padding_is_not_written(backend, rng) -> None:
    key, value, key_cache, value_cache, _ = make(rng)
    slots = torch.tensor([-1, 3, -1, 7, -1])
    before = key_cache.clone()
    kv_cache_write(key, value, key_cache, value_cache, slots, backend=backend)
    changed = (key_cache != before).flatten(0, 1).any(dim=(1, 2)).nonzero().flatten()
    assert changed.tolist() == [3, 7]


@pytest.mark.parametrize("backend", available())
def test_takes_views_of_a_wider_tensor(backend, rng) -> None:
    _, _, key_cache, value_cache, slots = make(rng)
    wide = torch.randn(5, 7, 8, generator=rng)
    kv_cache_write(wide[:, 3:5], wide[:, 5:], key_cache, value_cache, slots, backend=backend)
    assert torch.equal(key_cache.flatten(0, 1)[slots], wide[:, 3:5])
    assert torch.equal(value_cache.flatten(0, 1)[slots], wide[:, 5:])


@pytest.mark.parametrize("backend", available())
def test_writes_blocks_past_two_gibibytes(backend, rng) -> None:
    torch.use_deterministic_algorithms(False)  # else 2 GiB are really filled
    num_blocks = 2**31 // (16 * 64 * 2) + 2
    cache = torch.empty(num_blocks, 16, 1, 64, dtype=torch.float16)
    token = torch.randn(1, 1, 64, generator=rng).half()
    slot = torch.tensor([num_blocks * 16 - 1])
    kv_cache_write(token, token, cache, cache, slot, backend=backend)
    assert torch.equal(cache[-1, -1], token[0])


@pytest.mark.parametrize(
    ("index", "spoil", "name"),
    [
        (0, lambda t: t.long(), "key"),
        (0, lambda t: t[:, 0], "key"),
        (1, lambda t: t[1:], "value"),
        (1, lambda t: t.half(), "value"),
        (2, lambda t: t[..., :4], "key_cache"),
        (3, lambda t: t[:3], "value_cache"),
        (2, lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), "key_cache"),
        (4, lambda t: t.int(), "slot_mapping"),
        (4, lambda t: t[1:], "slot_mapping"),
        (4, lambda t: t.to("meta"), "slot_mapping"),
    ],
)
def test_refuses_bad_arguments_by_name(index, spoil, name, rng) -> None:
    arguments = list(make(rng))
    arguments[index] = spoil(arguments[index])
    with pytest.raises(KernelArgumentError) as refused:
        kv_cache_write(*arguments)
    assert refused.value.argument == name
