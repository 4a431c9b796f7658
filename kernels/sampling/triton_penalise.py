"""A thread changes one score."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128


def penalise(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    num_pairs = rows.shape[0]
    if num_pairs == 0:
        return
    _penalise_kernel[(triton.cdiv(num_pairs, _BLOCK),)](
        logits,
        rows.contiguous(),
        token_ids.contiguous(),
        counts.contiguous(),
        repetition.contiguous(),
        presence.contiguous(),
        frequency.contiguous(),
        num_pairs,
        logits.stride(0),
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_pairs"])
def _penalise_kernel(
    logits_ptr,
    rows_ptr,
    token_ids_ptr,
    counts_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    num_pairs,
    stride_row,
    BLOCK: tl.constexpr,
):
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = pairs < num_pairs
    row = tl.load(rows_ptr + pairs, mask=mask, other=0)
    scores_ptr = logits_ptr + row * stride_row + tl.load(token_ids_ptr + pairs, mask=mask, other=0)
    count = tl.load(counts_ptr + pairs, mask=mask, other=0).to(tl.float32)
    repetition = tl.load(repetition_ptr + pairs, mask=mask, other=1.0)
    presence = tl.load(presence_ptr + pairs, mask=mask, other=0.0)
    frequency = tl.load(frequency_ptr + pairs, mask=mask, other=0.0)
    score = tl.load(scores_ptr, mask=mask, other=0.0)
    score = tl.where(score > 0, score / repetition, score * repetition)
    score -= tl.where(count > 0, presence, 0.0) + frequency * count
    tl.store(scores_ptr, score, mask=mask)
