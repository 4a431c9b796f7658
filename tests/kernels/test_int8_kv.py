"""Keys and values in 8 bits, on every backend that runs here."""

import pytest
import torch

from kernels import int8_kv
from kernels.backends import available
from kernels.errors import KernelArgumentError
from kernels.kv_cache_write import kv_cache_write
from kernels.paged_attention import paged_attention, reference


def test_a_number_is_off_by_at_most_half_a_step_of_its_own_head(rng) -> None:
    heads = torch.randn(40, 3, 64, generator=rng) * torch.tensor([1e-3, 1.0, 300.0])[:, None]
    quantised, scales = int8_kv.quantise(heads)
    assert quantised.dtype == torch.int8
    assert quantised.abs().amax(dim=-1).eq(127).all()
    error = (int8_kv.dequantise(quantised, scales) - heads).abs()
    assert (error <= scales[..., None] * 0.5001).all()


def test_zeros_stay_zeros() -> None:
    quantised, scales = int8_kv.quantise(torch.zeros(2, 3, 8))
    assert not quantised.any()
    assert not scales.any()


@pytest.mark.parametrize("backend", available())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_written_token_lies_in_its_slot_and_nothing_else_changes(rng, dtype, backend) -> None:
    shape = (6, 8, 2, 16)
    caches = [torch.full(shape, 5, dtype=torch.int8) for _ in range(2)]
    scales = [torch.full(shape[:-1], 7.0) for _ in range(2)]
    key, value = (torch.randn(4, 2, 16, generator=rng).to(dtype) for _ in range(2))
    slots = torch.tensor([9, -1, 47, 0])
    kv_cache_write(
        key,
        value,
        *caches,
        slots,
        key_scales=scales[0],
        value_scales=scales[1],
        backend=backend,
    )
    for heads, cache, scale in zip((key, value), caches, scales, strict=True):
        numbers, wanted = int8_kv.quantise(heads)
        flat, flat_scale = cache.flatten(0, 1), scale.flatten(0, 1)
        for token, slot in ((0, 9), (2, 47), (3, 0)):
            assert torch.equal(flat[slot], numbers[token])
            assert torch.equal(flat_scale[slot], wanted[token])
        rest = [slot for slot in range(48) if slot not in (9, 47, 0)]
        assert flat[rest].eq(5).all()
        assert flat_scale[rest].eq(7.0).all()


@pytest.mark.parametrize("backend", available())
def test_a_head_of_zeros_is_written_as_zeros(backend) -> None:
    heads = torch.zeros(1, 2, 16)
    heads[:, 1] = 3.0
    caches = [torch.full((1, 8, 2, 16), 5, dtype=torch.int8) for _ in range(2)]
    scales = [torch.full((1, 8, 2), 7.0) for _ in range(2)]
    slots = torch.tensor([3])
    kv_cache_write(
        heads,
        heads,
        *caches,
        slots,
        key_scales=scales[0],
        value_scales=scales[1],
        backend=backend,
    )
    for cache, scale in zip(caches, scales, strict=True):
        assert cache[0, 3, 0].eq(0).all()
        assert cache[0, 3, 1].eq(127).all()
        assert scale[0, 3].tolist() == [0.0, pytest.approx(3 / 127)]


@pytest.mark.parametrize("backend", available())
def test_attention_reads_what_the_numbers_stand_for(rng, backend) -> None:
    caches = [torch.randn(9, 8, 2, 16, generator=rng) for _ in range(2)]
    (keys, key_scales), (values, value_scales) = (int8_kv.quantise(each) for each in caches)
    # Past each request's end lies anything.
    key_scales[3, 5:], value_scales[3, 5:] = torch.nan, torch.nan
    arguments = {
        "query": torch.randn(6, 4, 16, generator=rng),
        "block_tables": torch.tensor([[2, 3, 77], [8, 0, 5]], dtype=torch.int32),
        "seq_lens": torch.tensor([13, 20], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 1, 6], dtype=torch.int32),
        "scale": 0.25,
    }
    got = paged_attention(
        key_cache=keys,
        value_cache=values,
        key_scales=key_scales,
        value_scales=value_scales,
        backend=backend,
        **arguments,
    )
    want = reference.paged_attention(
        key_cache=int8_kv.dequantise(keys, key_scales),
        value_cache=int8_kv.dequantise(values, value_scales),
        **arguments,
    )
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


def test_caches_without_their_scales_are_refused(rng) -> None:
    cache = torch.zeros(2, 8, 2, 16, dtype=torch.int8)
    scales = torch.zeros(2, 8, 2)
    token = torch.randn(1, 2, 16, generator=rng)
    slot = torch.tensor([0])
    with pytest.raises(KernelArgumentError, match="key_cache"):
        kv_cache_write(token, token, cache, cache, slot)
    with pytest.raises(KernelArgumentError, match="value_scales"):
        kv_cache_write(token, token, cache, cache, slot, key_scales=scales)
    with pytest.raises(KernelArgumentError, match="key_scales"):
        kv_cache_write(token, token, cache, cache, slot, key_scales=scales[:1], value_scales=scales)
    with pytest.raises(KernelArgumentError, match="int8"):
        kv_cache_write(
            token, token, cache.float(), cache, slot, key_scales=scales, value_scales=scales
        )
