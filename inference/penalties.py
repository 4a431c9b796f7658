"""Penalties for what was said before, over a batch; each request's counts grow as its answer does.

A step costs the same whatever the length of an answer: only its new tokens are counted.
Owner: the engine thread.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inference.device_copies import array_to_device, to_device
from inference.sampling_params import SamplingParams
from kernels.sampling import penalise

IntArray = npt.NDArray[np.int64]


class TokenCounts:
    """How often each token stands in one request's output; tokens of its prompt alone count 0."""

    def __init__(self, prompt_ids: IntArray) -> None:
        """`prompt_ids` are distinct."""
        self._size = len(prompt_ids)
        self._ids = np.zeros(2 * self._size + 64, np.int64)
        self._ids[: self._size] = prompt_ids
        self._counts = np.zeros_like(self._ids)
        self._place_of = dict(zip(prompt_ids.tolist(), range(self._size), strict=True))
        self._num_counted = 0

    def count(self, output_token_ids: Sequence[int]) -> None:
        """Take in what came to the output since the last call."""
        for token_id in output_token_ids[self._num_counted :]:
            place = self._place_of.setdefault(token_id, self._size)
            if place == self._size:
                self._append(token_id)
            self._counts[place] += 1
        self._num_counted = len(output_token_ids)

    @property
    def ids(self) -> IntArray:
        """Distinct, in no order."""
        return self._ids[: self._size]

    @property
    def counts(self) -> IntArray:
        """Of `ids`, in their order."""
        return self._counts[: self._size]

    def _append(self, token_id: int) -> None:
        if self._size == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[self._size] = token_id
        self._size += 1


def penalise_rows(
    logits: Tensor,
    rows: Sequence[int],
    counts: Sequence[TokenCounts],
    params: Sequence[SamplingParams],
) -> None:
    """Apply the penalties of `params` to `rows` of `logits`, in place.

    Args:
        logits: [num_rows, vocab_size] fp32.
        rows: distinct; `counts` and `params` are theirs, in the same order.
    """
    device = logits.device
    lengths = [len(each.ids) for each in counts]
    row_of_id, token_ids = places(rows, [each.ids for each in counts], device)

    def spread(values: Iterable[float]) -> Tensor:
        repeated = np.repeat(np.fromiter(values, np.float32, len(lengths)), lengths)
        return array_to_device(repeated, device)

    penalise(
        logits,
        row_of_id,
        token_ids,
        array_to_device(np.concatenate([each.counts for each in counts]), device),
        repetition=spread(each.repetition_penalty for each in params),
        presence=spread(each.presence_penalty for each in params),
        frequency=spread(each.frequency_penalty for each in params),
    )


def places(
    rows: Sequence[int], ids: Sequence[IntArray], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Index of every (row, id) pair; no pair twice where each row's ids are distinct."""
    row_of_id = np.repeat(np.array(rows, np.int64), [len(row_ids) for row_ids in ids])
    moved = to_device({"rows": row_of_id, "ids": np.concatenate(ids)}, device)
    return moved["rows"], moved["ids"]
