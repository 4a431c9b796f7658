"""A program draws for one row, in passes over its scores; nothing is sorted.

The least weight that top_k or top_p lets through is found by bisection over the bits of a float:
bits of numbers that are not negative are ordered as the numbers, so 30 passes end at it exactly.
The draw is the Gumbel-max trick: the greatest of score minus log of an exponential number.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_launch import power_of_2

_BLOCK = 8192
# Bits of 1.0, the greatest weight.
_BITS_OF_ONE = tl.constexpr(0x3F800000)


def sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return token_ids
    block = min(_BLOCK, power_of_2(vocab_size))
    _sample_kernel[(num_rows,)](
        token_ids,
        logits,
        seeds.contiguous(),
        positions.contiguous(),
        temperature.contiguous(),
        top_k.contiguous(),
        top_p.contiguous(),
        min_p.contiguous(),
        vocab_size,
        logits.stride(0),
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 16),
    )
    return token_ids


@triton.jit
def _mix(state):
    """The 32-bit finaliser of MurmurHash3, of uint32."""
    state = (state ^ (state >> 16)) * tl.full([], 0x85EBCA6B, tl.uint32)
    state = (state ^ (state >> 13)) * tl.full([], 0xC2B2AE35, tl.uint32)
    return state ^ (state >> 16)


@triton.jit
def _exponential(columns, first, second):
    """Exponentially distributed numbers of token ids; exact where they are small."""
    bits = _mix(_mix(columns.to(tl.uint32) ^ first) + second)
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    return tl.where(uniform < 1e-3, uniform + uniform * uniform / 2, -tl.log(1.0 - uniform))


@triton.jit
def _weights(row_ptr, columns, vocab_size, largest, heat):
    scores = tl.load(row_ptr + columns, mask=columns < vocab_size, other=float("-inf"))
    return tl.exp((scores - largest) / heat)


@triton.jit
def _above(row_ptr, vocab_size, largest, heat, floor, BLOCK: tl.constexpr):
    """Number and sum of the weights above `floor`."""
    counts = tl.zeros([BLOCK], tl.int32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        weights = _weights(row_ptr, start + tl.arange(0, BLOCK), vocab_size, largest, heat)
        counts += (weights > floor).to(tl.int32)
        sums += tl.where(weights > floor, weights, 0.0)
    return tl.sum(counts, axis=0), tl.sum(sums, axis=0)


@triton.jit
def _least_kept(
    row_ptr, vocab_size, largest, heat, limit, mass, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """The least weight with fewer than `limit` weights, or less than `mass`, above it."""
    low = -1
    high = tl.full([], _BITS_OF_ONE, tl.int32)  # nothing weighs more
    while high - low > 1:
        middle = (low + high) // 2
        floor = middle.to(tl.float32, bitcast=True)
        count, total = _above(row_ptr, vocab_size, largest, heat, floor, BLOCK)
        if BY_COUNT:
            is_kept = count < limit
        else:
            is_kept = total < mass
        high = tl.where(is_kept, middle, high)
        low = tl.where(is_kept, low, middle)
    return high.to(tl.float32, bitcast=True)


@triton.jit
def _sample_kernel(
    token_ids_ptr,
    logits_ptr,
    seeds_ptr,
    positions_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    vocab_size,
    stride_row,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_row
    columns = tl.arange(0, BLOCK)
    greatest = tl.full([BLOCK], float("-inf"), tl.float32)
    num_nan = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        mask = start + columns < vocab_size
        scores = tl.load(row_ptr + start + columns, mask=mask, other=float("-inf"))
        num_nan += (scores != scores).to(tl.int32)
        greatest = tl.maximum(greatest, scores)
    largest = tl.max(greatest, axis=0)
    is_usable = (tl.sum(num_nan, axis=0) == 0) & (tl.abs(largest) < float("inf"))
    if not is_usable:
        tl.store(token_ids_ptr + row, tl.full([], -1, tl.int64))
        return

    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    floor = tl.load(min_p_ptr + row)
    is_drawn = temperature > 0.0
    heat = tl.where(is_drawn, temperature, 1.0)
    if is_drawn:
        has_top_k = (top_k > 0) & (top_k < vocab_size)
        of_top_k = 0.0
        if has_top_k:
            of_top_k = _least_kept(row_ptr, vocab_size, largest, heat, top_k, 0.0, True, BLOCK)
            floor = tl.maximum(floor, of_top_k)
        if top_p < 1.0:
            # What top_k leaves; of tokens that tie at its end, as many as it names.
            if has_top_k:
                count, mass = _above(row_ptr, vocab_size, largest, heat, of_top_k, BLOCK)
                mass += (top_k - count).to(tl.float32) * of_top_k
            else:
                count, mass = _above(row_ptr, vocab_size, largest, heat, -1.0, BLOCK)
            of_top_p = _least_kept(
                row_ptr, vocab_size, largest, heat, 0, top_p * mass, False, BLOCK
            )
            floor = tl.maximum(floor, of_top_p)

    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + row).to(tl.uint32)
    first = _mix(seed.to(tl.uint32) ^ tl.full([], 0x9E3779B9, tl.uint32))
    first = _mix(first ^ position)
    second = _mix((seed >> 32).to(tl.uint32) ^ tl.full([], 0x85EBCA6B, tl.uint32))
    second = _mix(second ^ first)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token_ids = start + columns
        mask = token_ids < vocab_size
        logits = tl.load(row_ptr + token_ids, mask=mask, other=float("-inf"))
        scores = (logits - largest) / heat
        if is_drawn:
            scores = tl.where(
                tl.exp(scores) >= floor,
                scores - tl.log(_exponential(token_ids, first, second)),
                float("-inf"),
            )
        is_better = scores > best
        best = tl.where(is_better, scores, best)
        best_id = tl.where(is_better, token_ids, best_id)
    # Of equals the first: each lane holds the first of its own.
    is_best = best == tl.max(best, axis=0)
    chosen = tl.min(tl.where(is_best, best_id, vocab_size), axis=0)
    tl.store(token_ids_ptr + row, chosen.to(tl.int64))
