"""Paged attention of the compiled step against the reference, each set of kernels in turn."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import int8_kv
from kernels.native import library
from kernels.paged_attention import reference
from tests.kernels.native_cases import usable_kernels

KERNELS = usable_kernels()
# bf16 kernels round the softmax weights and the result to bf16; values are of size 1.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def step(
    rng: torch.Generator,
    lengths: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 64,
    block_size: int = 16,
) -> dict[str, Any]:
    """Arguments of a step; (new tokens, context) of each request. NaN wherever no token lies."""
    num_heads, num_kv_heads = heads
    needed = [-(-context // block_size) for _, context in lengths]
    order = torch.randperm(sum(needed) + 3, generator=rng)
    shape = (len(order), block_size, num_kv_heads, head_dim)
    keys, values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    used = 0
    for row, (_, context) in enumerate(lengths):
        for index in range(needed[row]):
            block = int(order[used])
            used += 1
            tables[row, index] = block
            tokens = min(block_size, context - index * block_size)
            for cache in (keys, values):
                cache[block, :tokens] = torch.randn(tokens, num_kv_heads, head_dim, generator=rng)
    counts = torch.tensor([0] + [new for new, _ in lengths])
    return {
        "query": torch.randn(int(counts.sum()), num_heads, head_dim, generator=rng).bfloat16(),
        "key_cache": keys.bfloat16(),
        "value_cache": values.bfloat16(),
        "block_tables": tables,
        "seq_lens": torch.tensor([context for _, context in lengths], dtype=torch.int32),
        "query_start_loc": counts.cumsum(0).int(),
        "scale": head_dim**-0.5,
    }


def native(kernels: str, arguments: dict[str, Any]) -> Tensor:
    query = arguments["query"].to(library.activations_dtype(kernels))
    rest = {name: value for name, value in arguments.items() if name != "query"}
    result: Tensor = torch.ops.blockhouse.paged_attention(kernels, query, **rest)
    return result


def in_eight_bits(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same step over int8 caches, and over what those caches stand for. Where no token lies:
    full numbers with NaN scales."""
    quantised, widened = dict(arguments), dict(arguments)
    for name in ("key", "value"):
        cache = arguments[f"{name}_cache"].float()
        numbers, scales = int8_kv.quantise(cache.nan_to_num(0.0))
        empty = cache.isnan().any(dim=-1)
        numbers[empty], scales[empty] = 127, torch.nan
        quantised |= {f"{name}_cache": numbers, f"{name}_scales": scales}
        widened[f"{name}_cache"] = int8_kv.dequantise(numbers, scales)
    return quantised, widened


def check_eight_bits(kernels: str, arguments: dict[str, Any]) -> None:
    quantised, widened = in_eight_bits(arguments)
    want = reference.paged_attention(**(widened | {"query": arguments["query"].float()}))
    got = native(kernels, quantised)
    # Numbers in 8 bits and their scales are exact in fp32: the same tolerance as without them.
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)


def check(kernels: str, arguments: dict[str, Any]) -> None:
    want = reference.paged_attention(**(arguments | {"query": arguments["query"].float()}))
    got = native(kernels, arguments)
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_decodes_chunks_and_whole_prompts_in_one_step(rng, kernels, block_size) -> None:
    lengths = [(1, 1), (1, 5), (1, 32), (1, 77), (3, 3), (17, 17), (33, 70), (5, 48), (2, 300)]
    check(kernels, step(rng, lengths, block_size=block_size))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_decodes_of_contexts_around_the_pieces_that_they_are_read_in(
    rng, kernels, block_size
) -> None:
    lengths = [
        (1, context) for context in (15, 16, 17, 247, 248, 249, 255, 256, 257, 511, 513, 700)
    ]
    arguments = step(rng, lengths, block_size=block_size)
    check(kernels, arguments)
    check_eight_bits(kernels, arguments)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (9, 1)])
def test_what_is_left_of_a_prompts_tiles_has_a_context_of_any_length(rng, kernels, heads) -> None:
    lengths = [(new, context) for new in (5, 7, 17, 33, 49, 50) for context in (255, 257, 700)]
    check(kernels, step(rng, lengths, heads=heads))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("head_dim", [8, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (7, 1), (9, 3)])
def test_head_sizes_and_sharing(rng, kernels, head_dim, heads) -> None:
    check(kernels, step(rng, [(1, 40), (21, 35)], heads=heads, head_dim=head_dim))


@pytest.mark.parametrize("kernels", KERNELS)
def test_many_query_heads_share_one_kv_head(rng, kernels) -> None:
    check(kernels, step(rng, [(1, 40), (21, 35)], heads=(40, 1)))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("context", [255, 256, 257, 511, 513, 1000])
def test_long_contexts_are_split_and_joined(rng, kernels, context) -> None:
    check(kernels, step(rng, [(1, context), (40, context), (1, 3)]))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_eight_bits_in_every_kind_of_step(rng, kernels, block_size) -> None:
    lengths = [(1, 1), (1, 5), (1, 77), (3, 3), (33, 70), (2, 300), (1, 600)]
    check_eight_bits(kernels, step(rng, lengths, block_size=block_size))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (7, 1)])
def test_eight_bits_for_head_sizes_and_sharing(rng, kernels, head_dim, heads) -> None:
    check_eight_bits(kernels, step(rng, [(1, 40), (21, 35)], heads=heads, head_dim=head_dim))


def with_shared_prefix(
    arguments: dict[str, Any], rows: list[int], num_blocks: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`rows` hold the first row's first blocks; and the same with copies of those blocks."""
    shared, apart = dict(arguments), dict(arguments)
    tables = arguments["block_tables"].clone()
    tables[rows, :num_blocks] = tables[rows[0], :num_blocks]
    shared["block_tables"] = tables
    keys, values = arguments["key_cache"].clone(), arguments["value_cache"].clone()
    for row in rows[1:]:
        own = arguments["block_tables"][row, :num_blocks].long()
        first = tables[rows[0], :num_blocks].long()
        keys[own], values[own] = keys[first], values[first]
    return shared, apart | {"key_cache": keys, "value_cache": values}


def readers(arguments: dict[str, Any]) -> list[int]:
    names = ("block_tables", "seq_lens", "query_start_loc")
    tensors = [arguments[name] for name in names]
    found: list[int] = torch.ops.blockhouse.context_readers(
        *tensors, arguments["key_cache"].shape[1]
    )
    return found


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("eight_bits", [False, True])
def test_a_shared_prefix_is_read_once_and_changes_no_bit(rng, kernels, eight_bits) -> None:
    lengths = [(1, 700), (1, 520), (5, 600), (1, 900), (1, 300), (1, 640)]
    arguments = step(rng, lengths)
    shared, apart = with_shared_prefix(arguments, [0, 1, 3, 5], 512 // 16)
    # Two whole pieces of 256 with four readers; each one's own rest, and the fifth's all, apart.
    assert sorted(readers(shared)) == [1] * 7 + [4, 4]
    assert set(readers(apart)) == {1}
    if eight_bits:
        (shared, _), (apart, _) = in_eight_bits(shared), in_eight_bits(apart)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            assert torch.equal(native(kernels, shared), native(kernels, apart))
        finally:
            torch.set_num_threads(1)


def test_a_piece_is_shared_only_where_all_its_blocks_are(rng) -> None:
    arguments = step(rng, [(1, 300), (1, 300), (1, 300)])
    tables = arguments["block_tables"]
    tables[1, :9] = tables[0, :9]
    tables[2, :16] = tables[0, :16]
    # The last block alone is the same: no prefix cache gives this, and it is no shared piece.
    tables[1, 15] = tables[0, 15]
    assert sorted(readers(arguments)) == [1, 1, 1, 1, 2]
    for kernels in KERNELS:
        check(kernels, arguments | {"block_tables": tables})


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_decode_does_not_depend_on_its_neighbours(rng, kernels) -> None:
    arguments = step(rng, [(1, context) for context in (700, 3, 256, 90, 300, 17, 1, 64, 500, 40)])
    together = native(kernels, arguments)
    for row in range(len(together)):
        alone = arguments | {
            "query": arguments["query"][row : row + 1],
            "block_tables": arguments["block_tables"][row : row + 1].contiguous(),
            "seq_lens": arguments["seq_lens"][row : row + 1],
            "query_start_loc": torch.tensor([0, 1], dtype=torch.int32),
        }
        assert torch.equal(native(kernels, alone)[0], together[row])


@pytest.mark.parametrize("kernels", KERNELS)
def test_large_scores_neither_overflow_nor_vanish(rng, kernels) -> None:
    arguments = step(rng, [(1, 300), (20, 40)])
    arguments["scale"] = 40.0
    got = native(kernels, arguments)
    assert torch.isfinite(got.float()).all()
    # One key takes nearly all the weight: the result is about a value, not a mean near zero.
    assert got.float().abs().mean() > 0.3


@pytest.mark.parametrize("kernels", KERNELS)
def test_inputs_are_unchanged(rng, kernels) -> None:
    arguments = step(rng, [(1, 300), (20, 40)])
    before = {name: value.clone() for name, value in arguments.items() if name != "scale"}
    native(kernels, arguments)
    for name, value in before.items():
        assert torch.equal(arguments[name].nan_to_num(7), value.nan_to_num(7)), name


def test_more_threads_change_nothing(rng) -> None:
    arguments = step(rng, [(1, 700), (40, 300), (1, 9), (17, 17)])
    alone = native(KERNELS[0], arguments)
    torch.set_num_threads(2)
    try:
        assert torch.equal(native(KERNELS[0], arguments), alone)
    finally:
        torch.set_num_threads(1)


def test_wrong_arguments_are_refused(rng) -> None:
    arguments = step(rng, [(1, 20)])
    with pytest.raises(RuntimeError, match="bfloat16"):
        native("portable", arguments | {"key_cache": arguments["key_cache"].float()})
    quantised, _ = in_eight_bits(arguments)
    with pytest.raises(RuntimeError, match="bfloat16, or int8 with scales"):
        native("portable", {**arguments, "key_cache": quantised["key_cache"]})
    with pytest.raises(RuntimeError, match="one for each head of each token"):
        native("portable", quantised | {"key_scales": quantised["key_scales"][:, :3].contiguous()})
    del quantised["value_scales"], quantised["value_cache"]
    with pytest.raises(RuntimeError, match="both caches have scales"):
        native("portable", arguments | quantised)
    with pytest.raises(RuntimeError, match="int32"):
        native("portable", arguments | {"seq_lens": arguments["seq_lens"].long()})
