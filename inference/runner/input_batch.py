"""A scheduled step as tensors: what the forward pass reads. Built on the engine thread.

Built with numpy on the host and moved to the device once, because the Python part of a step is
a delay for every socket of the process.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inference.device_copies import to_device
from inference.outputs import SchedulerOutput


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step's new tokens, requests back to back; decodes first, then prompt chunks.

    All tensors are contiguous and lie on the forward pass's device.
    """

    # [num_tokens] int64
    input_ids: Tensor
    # [num_tokens] int64, position of each new token in its request
    positions: Tensor
    # [num_tokens] int64, block_id * block_size + offset of each new token
    slot_mapping: Tensor
    # [num_requests, max_blocks] int32; entries past a request's length are 0 and ignored
    block_tables: Tensor
    # [num_requests] int32, context length including the new tokens
    seq_lens: Tensor
    # [num_requests + 1] int32, prefix sums of new tokens
    query_start_loc: Tensor
    # [num_samples] int64, rows of the new tokens whose logits are wanted, ascending; may be empty.
    # One a sampling request, and one more for each token of its draft.
    logits_indices: Tensor
    # The same numbers known on the host, so that nobody asks the device for them.
    num_tokens: int
    num_requests: int
    # Leading requests with exactly one new token.
    num_decodes: int
    max_query_len: int
    max_seq_len: int

    @property
    def only_decodes(self) -> bool:
        """Whether every request has exactly one new token."""
        return self.num_decodes == self.num_requests


def _sampled_rows(ends: npt.NDArray[np.int64], drafts: list[int]) -> npt.NDArray[np.int64]:
    """Rows of the newest known tokens and of the drafts behind them, ascending.

    `ends`: one past the last row of each request that samples; `drafts`: how many it has.
    """
    if not any(drafts):
        return ends - 1
    pairs = zip(ends.tolist(), drafts, strict=True)
    return np.concatenate([np.arange(end - 1 - drafted, end) for end, drafted in pairs])


def build_input_batch(
    step: SchedulerOutput, block_size: int, device: torch.device, *, with_ids: bool = True
) -> InputBatch:
    """Tensors of `step`; its `scheduled` must not be empty.

    Args:
        with_ids: False leaves `input_ids` empty, of tokens that the host does not know yet.
    """
    scheduled = step.scheduled
    num_requests = len(scheduled)
    starts = np.fromiter((part.start for part in scheduled), np.int64, num_requests)
    counts = np.fromiter((part.num_new_tokens for part in scheduled), np.int64, num_requests)
    samples = np.fromiter((part.samples for part in scheduled), np.bool_, num_requests)
    drafts = [len(part.draft_token_ids) for part in scheduled if part.samples]

    query_start_loc = np.zeros(num_requests + 1, np.int64)
    np.cumsum(counts, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])
    seq_lens = starts + counts
    max_seq_len = int(seq_lens.max())

    ids: list[int] = []
    for part in scheduled if with_ids else ():
        ids += part.token_ids()
    row_of_token = np.repeat(np.arange(num_requests), counts)
    positions = np.arange(num_tokens) + (starts - query_start_loc[:-1])[row_of_token]

    block_tables = np.zeros((num_requests, -(-max_seq_len // block_size)), np.int32)
    for row, part in enumerate(scheduled):
        num_blocks = -(-(part.start + part.num_new_tokens) // block_size)
        block_tables[row, :num_blocks] = part.block_table[:num_blocks]
    block_of_token = block_tables[row_of_token, positions // block_size].astype(np.int64)

    not_decode = np.flatnonzero(counts != 1)
    arrays = {
        "input_ids": np.array(ids, np.int64),
        "positions": positions,
        "slot_mapping": block_of_token * block_size + positions % block_size,
        "logits_indices": _sampled_rows(query_start_loc[1:][samples], drafts),
        "block_tables": block_tables,
        "seq_lens": seq_lens.astype(np.int32),
        "query_start_loc": query_start_loc.astype(np.int32),
    }
    return InputBatch(
        **to_device(arrays, device),
        num_tokens=num_tokens,
        num_requests=num_requests,
        num_decodes=int(not_decode[0]) if not_decode.size else num_requests,
        max_query_len=int(counts.max()),
        max_seq_len=max_seq_len,
    )
