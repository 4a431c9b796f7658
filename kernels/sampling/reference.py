"""The formulas, with a sort; whole numbers of 32 bits are kept in int64."""

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    largest = logits.amax(dim=-1, keepdim=True)
    is_drawn = temperature[:, None] > 0
    heat = torch.where(is_drawn, temperature[:, None], 1.0)
    scores = (logits - largest) / heat
    weights = scores.exp()  # the most likely weighs 1
    floor = torch.maximum(_floor(weights, top_k, top_p), min_p)
    noise = -_exponentials(seeds, positions, logits.shape[1]).log()
    drawn = (scores + noise).masked_fill(weights < floor[:, None], float("-inf"))
    chosen = torch.where(is_drawn, drawn, logits).argmax(dim=-1)
    return chosen.masked_fill(~largest[:, 0].isfinite(), -1)


def _floor(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[num_rows]: the least weight that top_k and top_p let through."""
    vocab_size = weights.shape[1]
    limit = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)[:, None]
    ordered = weights.nan_to_num(0.0).sort(dim=-1, descending=True).values
    rank = torch.arange(vocab_size, device=weights.device)
    limited = ordered.double().masked_fill(rank >= limit, 0.0)
    before = limited.cumsum(dim=-1) - limited
    is_inside = before < top_p.double()[:, None] * limited.sum(dim=-1, keepdim=True)
    is_kept = (rank < limit) & (is_inside | (top_p >= 1)[:, None])
    kept = is_kept.sum(dim=-1, keepdim=True).clamp(min=1)
    return ordered.gather(1, kept - 1)[:, 0]


def _exponentials(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """[num_rows, vocab_size] fp32, exponentially distributed; exact where they are small."""
    first = _mix(_mix((seeds & _LOW) ^ 0x9E3779B9) ^ (positions & _LOW))
    second = _mix(_mix((seeds >> 32 & _LOW) ^ 0x85EBCA6B) ^ first)
    token_ids = torch.arange(vocab_size, device=seeds.device)
    bits = _mix((_mix(token_ids ^ first[:, None]) + second[:, None]) & _LOW)
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return torch.where(uniform < 1e-3, uniform + uniform * uniform / 2, -(1 - uniform).log())


def _mix(state: Tensor) -> Tensor:
    """The 32-bit finaliser of MurmurHash3."""
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _LOW
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _LOW
    return state ^ (state >> 16)


def penalise(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    scores = logits[rows, token_ids]
    scores = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores -= presence * (counts > 0) + frequency * counts
    logits[rows, token_ids] = scores
