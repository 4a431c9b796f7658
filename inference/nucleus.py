"""The least weight that top_k and top_p let through, for rows of weights on the CPU.

A nucleus mostly ends within few tokens, and finding few is much cheaper than sorting all: the 64
most likely are looked at first, then 1024. A flat row goes further. There nothing is sorted either:
bits of numbers that are not negative are ordered as the numbers are, so tokens are counted and
summed by the upper half of their bits, and those of one upper half by the lower one, which ends at
a single number. Each way finds the same: a token is kept while the tokens above it have less than
top_p of the whole, and fewer than top_k are above it (arXiv:1904.09751).
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

IntArray = npt.NDArray[np.int64]
DoubleArray = npt.NDArray[np.float64]

# How many of the most likely tokens are looked at, before all are.
WIDTHS = (64, 1024)
# Tokens summed at once. A sum over a whole row would round otherwise alone than in a batch, where
# torch shares rows and not parts of one between threads.
RUN = 128
# Of [counts above, sums above] each number: whether it is kept.
_IsKept = Callable[[DoubleArray, DoubleArray], npt.NDArray[np.bool_]]


def runs_of(weights: Tensor) -> Tensor:
    """[num_rows, num_runs, RUN], zeros behind the last; a view where that fits."""
    num_rows, vocab_size = weights.shape
    padded = F.pad(weights, (0, -vocab_size % RUN)) if vocab_size % RUN else weights
    return padded.view(num_rows, -1, RUN)


def least_weights(weights: Tensor, top_k: IntArray, top_p: DoubleArray) -> Tensor:
    """[num_rows] fp32: the least weight of each row that may be drawn, 0 for any.

    Args:
        weights: [num_rows, vocab_size] fp32, from 0 to 1; a row may be NaN.
        top_k: [num_rows], 0 for all.
        top_p: [num_rows], 1 for all.
    """
    vocab_size = weights.shape[1]
    limits = np.where(top_k > 0, np.minimum(top_k, vocab_size), vocab_size)
    floor = weights.new_zeros(len(limits))
    whole = runs_of(weights).sum(dim=-1).double().sum(dim=-1)
    wanted = np.where(top_p < 1, top_p, np.inf)
    left = np.flatnonzero(((limits < vocab_size) | (top_p < 1)) & whole.isfinite().numpy())
    for width in WIDTHS:
        if width >= vocab_size or not left.size:
            break
        rows = torch.from_numpy(left)
        found, ended = _within(
            weights if len(left) == len(weights) else weights[rows],
            torch.from_numpy(limits[left])[:, None],
            torch.from_numpy(wanted[left])[:, None],
            whole[rows, None],
            width,
        )
        floor[rows] = found
        left = left[~ended.numpy()]
    for row in left:
        floor[row] = _of_all(
            weights[row].numpy(), int(limits[row]), float(wanted[row]), float(whole[row])
        )
    return floor


def _within(
    weights: Tensor, limit: Tensor, wanted: Tensor, whole: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """The least weight as the `width` most likely tokens show it, and whether they show it."""
    top = weights.topk(width, dim=-1).values  # [num_rows, width], most likely first
    rank = torch.arange(width)
    limited = top.double().masked_fill_(rank >= limit, 0.0)
    mass = torch.where(limit <= width, limited.sum(dim=-1, keepdim=True), whole)
    before = (limited.cumsum(dim=-1) - limited) / mass
    kept = ((rank < limit) & (before < wanted)).sum(dim=-1, keepdim=True).clamp_(min=1)
    # A top_k beyond the width leaves its mass unknown.
    ended = (limit <= width) | ((kept < width) & (limit == weights.shape[1]))
    return top.gather(1, kept - 1)[:, 0], ended[:, 0]


def _of_all(weights: npt.NDArray[np.float32], limit: int, wanted: float, whole: float) -> float:
    """The least weight of one row. O(vocab_size)."""
    least, mass = 0.0, whole
    if limit < len(weights):
        least, num_above, above = _least_kept(weights, lambda counts, sums: counts < limit)
        # Of tokens that tie with the last one, as many as top_k names.
        mass = above + (limit - num_above) * least
    if wanted == np.inf:
        return least
    return max(least, _least_kept(weights, lambda counts, sums: sums / mass < wanted)[0])


def _least_kept(weights: npt.NDArray[np.float32], is_kept: _IsKept) -> tuple[float, float, float]:
    """The least number that is kept, the greatest one at least; how many are above it, their sum.

    Args:
        is_kept: true of whatever is above a number of which it is true.
    """
    num_above = above = 0.0
    for shift in (16, 0):
        keys = (weights.view(np.uint32) >> np.uint32(shift) & np.uint32(0xFFFF)).astype(np.int64)
        counts = np.bincount(keys).astype(np.float64)
        sums = np.bincount(keys, weights).astype(np.float64)
        counts_above = num_above + _sums_behind(counts)
        sums_above = above + _sums_behind(sums)
        kept = np.flatnonzero((counts > 0) & is_kept(counts_above, sums_above))
        key = kept[0] if kept.size else len(counts) - 1
        num_above, above = float(counts_above[key]), float(sums_above[key])
        weights = weights[keys == key]
    return float(weights[0]), num_above, above


def _sums_behind(numbers: DoubleArray) -> DoubleArray:
    """Of each place, the sum of all behind it."""
    behind = np.zeros_like(numbers)
    behind[:-1] = numbers[:0:-1].cumsum()[::-1]
    return behind
