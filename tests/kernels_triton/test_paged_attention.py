import pytest
import torch

from kernels import int8_kv
from kernels.backends import Backend
from kernels.paged_attention import paged_attention
from kernels.paged_attention.triton_decode import choose_num_splits, decode
from kernels.paged_attention.triton_tiles import PagedCaches
from tests.kernels_triton.paged import problem

# fp32: sums in another order. 16 bit: weights are rounded once more before the last product.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
MIXED = [(1, 70), (1, 1), (5, 40), (1, 33)]


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (64, torch.bfloat16),
        (80, torch.float16),
        (96, torch.bfloat16),
        (128, torch.float32),
        (256, torch.bfloat16),
    ],
    ids=str,
)
def test_every_head_size_and_dtype_stays_near_the_reference(head_dim, dtype, rng) -> None:
    arguments = problem(rng, MIXED, heads=(3, 1), head_dim=head_dim, block_size=16, dtype=dtype)
    exact = {name: t.float() if t.is_floating_point() else t for name, t in arguments.items()}
    got = paged_attention(**arguments, scale=head_dim**-0.5, backend=Backend.TRITON)
    want = paged_attention(**exact, scale=head_dim**-0.5, backend=Backend.REFERENCE)
    assert got.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "options"),
    [
        (64, torch.bfloat16, {}),
        (96, torch.float16, {"sliding_window": 20, "soft_cap": 5.0}),
        (128, torch.float32, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("loudness", [1.0, 1e-3])
def test_keys_and_values_in_8_bits(head_dim, dtype, options, loudness, rng) -> None:
    """Rounded as 16 bits are, however quiet values are: fp16 has little below 6e-5."""
    given = problem(rng, MIXED, heads=(6, 2), head_dim=head_dim, block_size=16, dtype=torch.float32)
    given["value_cache"] *= loudness
    quantised = {name: int8_kv.quantise(given[f"{name}_cache"]) for name in ("key", "value")}
    packed = {f"{name}_cache": numbers for name, (numbers, _) in quantised.items()}
    packed |= {f"{name}_scales": scales for name, (_, scales) in quantised.items()}
    exact = {f"{name}_cache": int8_kv.dequantise(*each) for name, each in quantised.items()}
    options = options | {"scale": head_dim**-0.5}
    query = given.pop("query").to(dtype)
    got = paged_attention(query, **(given | packed), **options, backend=Backend.TRITON)
    want = paged_attention(query.float(), **(given | exact), **options, backend=Backend.REFERENCE)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), want, atol=tolerance * loudness, rtol=tolerance)


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize(
    ("heads", "window", "cap"), [((2, 2), None, None), ((7, 1), 9, None), ((16, 1), 40, 3.0)]
)
def test_every_block_size_group_and_option(block_size, heads, window, cap, rng) -> None:
    lengths = [(1, 90), (1, 64), (3, 70)]
    arguments = problem(
        rng, lengths, heads=heads, head_dim=64, block_size=block_size, dtype=torch.float32
    )
    options = {"scale": 0.2, "sliding_window": window, "soft_cap": cap}
    got = paged_attention(**arguments, **options, num_decodes=2, backend=Backend.TRITON)
    want = paged_attention(**arguments, **options, backend=Backend.REFERENCE)
    torch.testing.assert_close(got, want, atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize("num_splits", [1, 2, 8])
@pytest.mark.parametrize("window", [None, 180])
def test_a_context_split_in_any_number_gives_the_same(num_splits, window, rng) -> None:
    lengths = [(1, 400), (1, 129), (1, 128), (1, 3)]
    arguments = problem(rng, lengths, heads=(2, 1), head_dim=64, block_size=16, dtype=torch.float32)
    want = paged_attention(
        **arguments, scale=0.125, sliding_window=window, backend=Backend.REFERENCE
    )
    del arguments["query_start_loc"]
    caches = PagedCaches(arguments.pop("key_cache"), arguments.pop("value_cache"))
    output = torch.full_like(arguments["query"], float("nan"))
    decode(
        output,
        caches=caches,
        **arguments,
        scale=0.125,
        sliding_window=window,
        soft_cap=None,
        num_splits=num_splits,
    )
    torch.testing.assert_close(output, want, atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_padding_rows_of_a_decode_are_zeros(num_splits, rng) -> None:
    arguments = problem(
        rng, [(1, 20), (1, 7)], heads=(4, 2), head_dim=64, block_size=16, dtype=torch.bfloat16
    )
    arguments["seq_lens"][1] = 0
    arguments["block_tables"][1] = 2**30
    del arguments["query_start_loc"]
    caches = PagedCaches(arguments.pop("key_cache"), arguments.pop("value_cache"))
    output = torch.full_like(arguments["query"], float("nan"))
    options = {"scale": 0.125, "sliding_window": None, "soft_cap": None}
    decode(output, caches=caches, **arguments, **options, num_splits=num_splits)
    assert output[0].isfinite().all()
    assert output[1].count_nonzero() == 0


def test_splits_fill_the_device_and_do_not_depend_on_lengths() -> None:
    assert choose_num_splits(8, 132) == 64
    assert choose_num_splits(16 * 8, 132) == 16
    assert choose_num_splits(64 * 8, 132) == 4
    assert choose_num_splits(256 * 8, 132) == 1
