"""Penalties, and the draw of a token by the Gumbel-max trick; for devices where a sort is dear."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.backends import Backend, choose, lazily
from kernels.checks import check_device, check_dtype, check_last_dim_contiguous, check_shape
from kernels.sampling import reference

_SAMPLE: dict[Backend, Callable[..., Tensor]] = {
    Backend.REFERENCE: reference.sample,
    Backend.CPU: reference.sample,
    Backend.TRITON: lazily("kernels.sampling.triton_sample", "sample"),
}
_PENALISE: dict[Backend, Callable[..., None]] = {
    Backend.REFERENCE: reference.penalise,
    Backend.CPU: reference.penalise,
    Backend.TRITON: lazily("kernels.sampling.triton_penalise", "penalise"),
}


def sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    backend: Backend | None = None,
) -> Tensor:
    """Draw a token id from each row; keeps no state.

    Temperature comes first, then top_k, then top_p over what top_k left, then min_p. Tokens that
    tie with the last one kept are kept too. A token's number is a hash of seed, position and id, so
    a row's draw does not depend on the rows beside it.

    Args:
        logits: [num_rows, vocab_size] fp32, last dimension contiguous; not changed.
        seeds, positions: [num_rows] int64.
        temperature: [num_rows] fp32; 0 takes the most likely token, the first of equals.
        top_k: [num_rows] int64; 0 is off.
        top_p: [num_rows] fp32 in (0, 1]; 1 is off (arXiv:1904.09751).
        min_p: [num_rows] fp32 in [0, 1]; 0 is off.
        backend: which implementation; None takes the fastest for the device.

    Returns:
        [num_rows] int64; -1 where a score is NaN or the greatest is not finite.

    Raises:
        KernelArgumentError: a shape, dtype, device or layout is not as above.
    """
    check_shape("logits", logits, None, None)
    check_dtype("logits", logits, torch.float32)
    check_last_dim_contiguous("logits", logits)
    per_row = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    whole = {"seeds": seeds, "positions": positions, "top_k": top_k}
    for name, tensor in (per_row | whole).items():
        check_shape(name, tensor, logits.shape[0])
        check_dtype(name, tensor, torch.float32 if name in per_row else torch.int64)
    check_device(logits.device, **per_row, **whole)
    draw = _SAMPLE[backend or choose(logits.device)]
    return draw(logits, seeds, positions, temperature, top_k, top_p, min_p)


def penalise(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    counts: Tensor,
    *,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    backend: Backend | None = None,
) -> None:
    """Lower the scores of tokens that were there before; changes `logits` in place.

    A positive score is divided by `repetition`, another multiplied; then `presence` is taken off
    if the count is above 0, and `frequency` times the count.

    Args:
        logits: [num_rows, vocab_size] fp32, last dimension contiguous.
        rows, token_ids: [num_pairs] int64; no pair twice, all inside `logits`.
        counts: [num_pairs] int64, times that the token was generated; 0 for the prompt's.
        repetition, presence, frequency: [num_pairs] fp32.
        backend: which implementation; None takes the fastest for the device.

    Raises:
        KernelArgumentError: a shape, dtype, device or layout is not as above.
    """
    check_shape("logits", logits, None, None)
    check_dtype("logits", logits, torch.float32)
    check_last_dim_contiguous("logits", logits)
    check_shape("rows", rows, None)
    factors = {"repetition": repetition, "presence": presence, "frequency": frequency}
    whole = {"rows": rows, "token_ids": token_ids, "counts": counts}
    for name, tensor in (factors | whole).items():
        check_shape(name, tensor, rows.shape[0])
        check_dtype(name, tensor, torch.float32 if name in factors else torch.int64)
    check_device(logits.device, **factors, **whole)
    apply = _PENALISE[backend or choose(logits.device)]
    apply(logits, rows, token_ids, counts, repetition, presence, frequency)
