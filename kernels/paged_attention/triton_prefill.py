"""Attention of requests with several new tokens: tiles of queries over tiles of blocks.

FlashAttention-2 (arXiv:2307.08691). A tile's rows are some tokens times the query heads of one
key-value head (arXiv:2305.13245), so a block is read once for all of them. Tiles of all requests
lie in one row of programs; a program finds its request by bisection.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from torch import Tensor

from kernels.paged_attention.triton_tiles import PagedCaches, attend_tile, divisor
from kernels.triton_launch import is_hopper, power_of_2
from kernels.triton_numbers import round_to


def prefill(
    output: Tensor,
    query: Tensor,
    caches: PagedCaches,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> None:
    """Write `output` for all new tokens of the requests; `query_start_loc` indexes `query`.

    `query` and `output` hold exactly these requests' tokens, the first at query_start_loc[0] of
    the step: only differences of `query_start_loc` count.
    """
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = caches.key.shape
    group = num_heads // num_kv_heads
    num_requests = seq_lens.shape[0]
    is_half = caches.multiply_as_half(query.dtype)
    on_hopper = is_hopper(query.device)
    options = tile_options(head_dim, group, is_half, on_hopper=on_hopper)
    num_tiles = num_tokens // options["BLOCK_Q"] + num_requests
    _paged_prefill_kernel[(num_tiles, num_kv_heads)](
        output,
        query,
        *caches,
        block_tables,
        seq_lens,
        query_start_loc,
        num_requests,
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
        **options,
    )


def tile_options(
    head_dim: int, group: int, is_half: bool, *, on_hopper: bool
) -> dict[str, int | bool]:
    """Sizes of tiles, warps and stages that spill no register.

    On sm_90 a warp group's product reads its operands from shared memory; on sm_80 they take
    registers, and products of fp32 take them everywhere.
    """
    block_d = power_of_2(head_dim)
    if not is_half:
        rows, block_n, num_warps, num_stages = (16, 16, 4, 1) if block_d <= 128 else (16, 16, 8, 1)
    elif on_hopper:
        rows, block_n, num_warps, num_stages = {
            256: (128, 32, 8, 2),
            128: (128, 64, 8, 3),
        }.get(block_d, (128, 64, 4, 3))
    else:
        rows, block_n, num_warps, num_stages = {
            256: (64, 32, 8, 2),
            128: (128, 32, 8, 3),
        }.get(block_d, (64, 64, 4, 3))
    rows = max(rows, power_of_2(group))
    return {
        "IS_HALF": is_half,
        "BLOCK_D": max(block_d, 16),
        "BLOCK_M": rows,
        "BLOCK_Q": rows // group,
        "BLOCK_N": block_n,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


@triton.jit
def _request_of_tile(starts_ptr, tile, num_requests, BLOCK_Q: tl.constexpr):
    """The last request whose tiles begin at or before `tile`, and where they begin.

    Request i begins at tile (its first token) // BLOCK_Q + i, which leaves room for all before it.
    """
    origin = tl.load(starts_ptr)
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = (tl.load(starts_ptr + middle) - origin) // BLOCK_Q + middle
        if first_tile <= tile:
            low = middle
        else:
            high = middle
    return low, (tl.load(starts_ptr + low) - origin) // BLOCK_Q + low


@triton.jit(
    do_not_specialize=["num_requests", "stride_table"],
    # They begin behind a step's decodes, however many there are.
    do_not_specialize_on_alignment=["tables_ptr", "lens_ptr", "starts_ptr"],
)
def _paged_prefill_kernel(
    output_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    key_scales_ptr,
    value_scales_ptr,
    tables_ptr,
    lens_ptr,
    starts_ptr,
    num_requests,
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
    IS_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Tiles late in a prompt have the most to read: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    request, first_tile = _request_of_tile(starts_ptr, tile, num_requests, BLOCK_Q)
    start = tl.load(starts_ptr + request)
    num_queries = tl.load(starts_ptr + request + 1) - start
    first_query = (tile - first_tile) * BLOCK_Q
    if first_query >= num_queries:
        return
    seq_len = tl.load(lens_ptr + request)
    num_before = seq_len - num_queries
    lanes = tl.arange(0, BLOCK_M)
    queries = first_query + lanes // GROUP
    tokens = (start - tl.load(starts_ptr) + queries).to(tl.int64)
    heads = kv_head * GROUP + lanes % GROUP
    dims = tl.arange(0, BLOCK_D)
    is_row = (lanes < BLOCK_Q * GROUP) & (queries < num_queries)
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    places = tokens * stride_query_token + heads * stride_query_head
    query = tl.load(query_ptr + places[:, None] + dims[None, :], mask=mask, other=0.0)
    if not IS_HALF:
        query = query.to(tl.float32)
    query_positions = num_before + queries

    table_ptr = tables_ptr + request.to(tl.int64) * stride_table
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight_sum = tl.zeros([BLOCK_M], tl.float32)
    # Every row of the tile sees the tokens up to its first query.
    begin = 0
    end_of_all = (num_before + first_query + 1) // BLOCK_N * BLOCK_N
    if SLIDING_WINDOW > 0:
        begin = tl.maximum(num_before + first_query + 1 - SLIDING_WINDOW, 0) // BLOCK_N * BLOCK_N
    end = tl.minimum(num_before + first_query + BLOCK_Q, seq_len)
    columns = tl.arange(0, BLOCK_N)
    for position in range(begin, end_of_all, BLOCK_N):
        sums, largest, weight_sum = attend_tile(
            sums,
            largest,
            weight_sum,
            query,
            query_positions,
            position + columns,
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
            SLIDING_WINDOW > 0,
        )
    for position in range(tl.maximum(begin, end_of_all), end, BLOCK_N):
        sums, largest, weight_sum = attend_tile(
            sums,
            largest,
            weight_sum,
            query,
            query_positions,
            position + columns,
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
    weight_sum = divisor(weight_sum, value_ptr)
    attended = sums / tl.where(weight_sum > 0.0, weight_sum, 1.0)[:, None]
    outputs = (tokens * (NUM_KV_HEADS * GROUP) + heads) * HEAD_DIM
    rounded = round_to(attended, output_ptr.dtype.element_ty)
    tl.store(output_ptr + outputs[:, None] + dims[None, :], rounded, mask=mask)
