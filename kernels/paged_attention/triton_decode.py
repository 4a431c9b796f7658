"""Attention of requests with one new token: the context is split among programs, then merged.

Flash-Decoding's split of keys and values, with the merge as a second kernel. The query heads of one
key-value head are the rows of a tile (arXiv:2305.13245), so a block is read once for all of them.
How many programs share a context depends on the number of requests alone, never on their lengths:
the launch is the same at every replay of a CUDA graph.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.paged_attention.triton_tiles import PagedCaches, attend_tile, divisor
from kernels.triton_launch import num_processors, power_of_2
from kernels.triton_numbers import round_to

_MAX_SPLITS = 64
# Programs for each multiprocessor: enough that unlike lengths even out.
_PROGRAMS_EACH = 8
# A split reads at least this many tokens.
_MIN_SPLIT_TOKENS = 128
# Splits merged at once.
_MERGE_BLOCK = 16


def decode(
    output: Tensor,
    query: Tensor,
    caches: PagedCaches,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    num_splits: int | None = None,
) -> None:
    """Write `output` [num_requests, num_heads, head_dim]; zeros for a `seq_lens` of 0 (padding).

    `num_splits` is a power of 2; None chooses.
    """
    num_requests, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = caches.key.shape
    group = num_heads // num_kv_heads
    options = tile_options(head_dim, group, caches.multiply_as_half(query.dtype))
    if num_splits is None:
        num_splits = choose_num_splits(num_requests * num_kv_heads, num_processors(query.device))
    # Of each split and head: the weighted values, then greatest score and sum of weights.
    shape = (num_requests, num_heads, num_splits if num_splits > 1 else 0)
    partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
    state = torch.empty((*shape, 2), dtype=torch.float32, device=query.device)
    min_tiles = triton.cdiv(_MIN_SPLIT_TOKENS, options["BLOCK_N"])
    _paged_decode_kernel[(num_requests, num_kv_heads, num_splits)](
        output,
        partial,
        state,
        query,
        *caches,
        block_tables,
        seq_lens,
        scale,
        soft_cap or 0.0,
        query.stride(0),
        query.stride(1),
        block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        SLIDING_WINDOW=sliding_window or 0,
        HAS_SOFT_CAP=soft_cap is not None,
        NUM_SPLITS=num_splits,
        MIN_TILES=min_tiles,
        **options,
    )
    if num_splits > 1:
        _merge_splits_kernel[(num_requests, num_heads)](
            output,
            partial,
            state,
            seq_lens,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=options["BLOCK_D"],
            BLOCK_N=options["BLOCK_N"],
            SLIDING_WINDOW=sliding_window or 0,
            NUM_SPLITS=num_splits,
            MIN_TILES=min_tiles,
            MERGE_BLOCK=min(_MERGE_BLOCK, num_splits),
            num_warps=4,
        )


def choose_num_splits(num_rows: int, processors: int) -> int:
    """Programs that share one context: a power of 2, so that few kernels are compiled."""
    wanted = -(-_PROGRAMS_EACH * processors // num_rows)
    return min(power_of_2(max(wanted, 1)), _MAX_SPLITS)


def tile_options(head_dim: int, group: int, is_half: bool) -> dict[str, int | bool]:
    """Sizes of tiles, warps and stages; a matrix product takes at least 16 rows."""
    block_d = power_of_2(head_dim)
    if not is_half:
        block_n, num_stages = (32, 1) if block_d <= 128 else (16, 1)
    else:
        block_n, num_stages = (64, 3) if block_d <= 128 else (32, 3)
    return {
        "IS_HALF": is_half,
        "BLOCK_D": max(block_d, 16),
        "BLOCK_G": max(power_of_2(group), 16),
        "BLOCK_N": block_n,
        "num_warps": 4,
        "num_stages": num_stages,
    }


@triton.jit
def _tiles_of_split(
    seq_len,
    BLOCK_N: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """First tile of the context that is read, end of its tiles, and tiles of each split."""
    first = 0
    if SLIDING_WINDOW > 0:
        first = tl.maximum(seq_len - SLIDING_WINDOW, 0) // BLOCK_N
    end = tl.cdiv(seq_len, BLOCK_N)
    return first, end, tl.maximum(tl.cdiv(end - first, NUM_SPLITS), MIN_TILES)


@triton.jit(do_not_specialize=["stride_table"])
def _paged_decode_kernel(
    output_ptr,
    partial_ptr,
    state_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    key_scales_ptr,
    value_scales_ptr,
    tables_ptr,
    lens_ptr,
    scale,
    soft_cap,
    stride_query_token,
    stride_query_head,
    stride_table,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    IS_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(lens_ptr + request)
    first, end, each = _tiles_of_split(seq_len, BLOCK_N, SLIDING_WINDOW, NUM_SPLITS, MIN_TILES)
    first += split * each
    end = tl.minimum(first + each, end)
    # The merge leaves out splits without tiles, except that a lone split always writes.
    if NUM_SPLITS > 1 and first >= end:
        return
    lanes = tl.arange(0, BLOCK_G)
    heads = kv_head * GROUP + lanes
    dims = tl.arange(0, BLOCK_D)
    mask = (lanes < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    places = request * stride_query_token + heads * stride_query_head
    query = tl.load(query_ptr + places[:, None] + dims[None, :], mask=mask, other=0.0)
    if not IS_HALF:
        query = query.to(tl.float32)
    query_positions = tl.zeros([BLOCK_G], tl.int32) + (seq_len - 1)

    table_ptr = tables_ptr + request * stride_table
    sums = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    largest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    weight_sum = tl.zeros([BLOCK_G], tl.float32)
    for tile in range(first, end):
        sums, largest, weight_sum = attend_tile(
            sums,
            largest,
            weight_sum,
            query,
            query_positions,
            tile * BLOCK_N + tl.arange(0, BLOCK_N),
            key_ptr,
            value_ptr,
            key_scales_ptr,
            value_scales_ptr,
            table_ptr,
            seq_len,
            kv_head,
            scale,
            soft_cap,
            NUM_KV_HEADS,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_SIZE,
            SLIDING_WINDOW,
            HAS_SOFT_CAP,
            True,
        )
    rows = request * (NUM_KV_HEADS * GROUP) + heads
    weight_sum = divisor(weight_sum, value_ptr)
    if NUM_SPLITS > 1:
        rows = rows * NUM_SPLITS + split
        tl.store(partial_ptr + rows[:, None] * HEAD_DIM + dims[None, :], sums, mask=mask)
        tl.store(state_ptr + rows * 2, largest, mask=lanes < GROUP)
        tl.store(state_ptr + rows * 2 + 1, weight_sum, mask=lanes < GROUP)
    else:
        attended = sums / tl.where(weight_sum > 0.0, weight_sum, 1.0)[:, None]
        rounded = round_to(attended, output_ptr.dtype.element_ty)
        tl.store(output_ptr + rows[:, None] * HEAD_DIM + dims[None, :], rounded, mask=mask)


@triton.jit
def _merge_splits_kernel(
    output_ptr,
    partial_ptr,
    state_ptr,
    lens_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MERGE_BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = request * NUM_HEADS + tl.program_id(1)
    seq_len = tl.load(lens_ptr + request)
    first, end, each = _tiles_of_split(seq_len, BLOCK_N, SLIDING_WINDOW, NUM_SPLITS, MIN_TILES)
    num_used = tl.cdiv(end - first, each)
    dims = tl.arange(0, BLOCK_D)
    sums = tl.zeros([BLOCK_D], tl.float32)
    largest = float("-inf")
    weight_sum = 0.0
    for begin in range(0, num_used, MERGE_BLOCK):
        splits = begin + tl.arange(0, MERGE_BLOCK)
        is_used = splits < num_used
        places = row * NUM_SPLITS + splits
        greatest = tl.load(state_ptr + places * 2, mask=is_used, other=float("-inf"))
        weight = tl.load(state_ptr + places * 2 + 1, mask=is_used, other=0.0)
        mask = is_used[:, None] & (dims < HEAD_DIM)[None, :]
        part = tl.load(
            partial_ptr + places[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0
        )
        new_largest = tl.maximum(largest, tl.max(greatest, axis=0))
        share = tl.exp2(greatest - new_largest)
        kept = tl.exp2(largest - new_largest)
        sums = sums * kept + tl.sum(part * share[:, None], axis=0)
        weight_sum = weight_sum * kept + tl.sum(weight * share, axis=0)
        largest = new_largest
    attended = sums / tl.where(weight_sum > 0.0, weight_sum, 1.0)
    rounded = round_to(attended, output_ptr.dtype.element_ty)
    tl.store(output_ptr + row * HEAD_DIM + dims, rounded, mask=dims < HEAD_DIM)
