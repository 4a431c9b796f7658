"""The decodes that most likely follow a step, computed while the host looks at the step's tokens.

The ids that a step sampled are on the device before the host has them: the device goes on with
them, one more token for each request, while the host reads the ids, ends requests, tells their
readers and plans the next step. What of that plan was computed so need not be computed again. What
ended or came otherwise is left unused: its keys and values lie behind the end of what its request
has, or in a block of nobody's.

Nothing is decided ahead: planning and sampling come after the ids, as without it, so answers do not
change. Owned by the engine thread; on the device everything is in the order of one stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from inference.device_copies import array_to_device
from inference.kv_cache.storage import KVCacheStorage
from inference.outputs import ScheduledRequest, SchedulerOutput
from inference.runner.forward import Forward
from inference.runner.input_batch import InputBatch, build_input_batch

# Blocks of the storage that hold a token whose request has no block for it yet: with more such
# requests in a step, one of 16 as a rule, nothing is computed ahead.
NUM_SPARE_BLOCKS = 16
# Steps without it, at most, after it was of little use.
_LONGEST_REST = 32


@dataclass(frozen=True, slots=True)
class Taken:
    """The part of a step that was computed before it was planned."""

    # What is still to be computed.
    rest: SchedulerOutput
    # [num_taken, vocab_size]
    logits: Tensor
    # For each row that the step samples, its row of `logits` with those of the rest behind them.
    order: Sequence[int]

    def join(self, computed: Tensor | None) -> Tensor:
        """Logits of the step, with those of the rest."""
        if computed is None:
            return self.logits
        joined = torch.cat([self.logits, computed])
        if list(self.order) == list(range(len(joined))):
            return joined
        return joined[array_to_device(np.array(self.order, np.int64), joined.device)]


class DecodesAhead:
    """`plan` and `start` in a step, then `take` with the next; `drop` when blocks move between.

    Args:
        forward: computes steps on `storage`, which has NUM_SPARE_BLOCKS spare blocks.
        most_requests: that it computes at once.
        max_len: tokens that a request may come to.
    """

    def __init__(
        self, forward: Forward, storage: KVCacheStorage, *, most_requests: int, max_len: int
    ) -> None:
        self._forward = forward
        self._storage = storage
        self._most_requests = most_requests
        self._max_len = max_len
        self._planned: tuple[dict[str, ScheduledRequest], list[int], InputBatch] | None = None
        self._parts: dict[str, ScheduledRequest] = {}
        self._logits: Tensor | None = None
        # Steps to go without it, and how many it shall be the next time.
        self._rest = 0
        self._next_rest = 1

    def plan(self, step: SchedulerOutput) -> None:
        """Prepare what follows `step`, which the device is computing."""
        self._planned = None
        if self._rest:
            self._rest -= 1
            return
        # A prompt that goes on makes the next step a large one.
        if not all(part.samples and not part.draft_token_ids for part in step.scheduled):
            return
        rows = [row for row, part in enumerate(step.scheduled) if not _ends(part, self._max_len)]
        spare = list(self._storage.spare_blocks)
        parts = {}
        for row in rows:
            part = step.scheduled[row]
            start = part.start + part.num_new_tokens
            table = part.block_table
            if start == len(table) * self._storage.block_size:
                if not spare:
                    return
                table = [*table, spare.pop()]
            follower = ScheduledRequest(part.request, start, 1, table, samples=True)
            parts[part.request.request_id] = follower
        if not 0 < len(parts) <= self._most_requests:
            return
        following = SchedulerOutput(step.step_id, list(parts.values()), len(parts))
        batch = build_input_batch(
            following, self._storage.block_size, self._storage.device, with_ids=False
        )
        self._planned = parts, rows, batch

    def start(self, token_ids: Tensor) -> None:
        """Begin with the ids [num_scheduled] that the planned step sampled, still on the device."""
        if self._planned is None:
            return
        (self._parts, rows, batch), self._planned = self._planned, None
        if len(rows) < len(token_ids):
            token_ids = token_ids[array_to_device(np.array(rows, np.int64), token_ids.device)]
        # A row without a token is not taken later, whatever is computed.
        self._logits = self._forward.forward(replace(batch, input_ids=token_ids.clamp(min=0)))

    def take(self, step: SchedulerOutput) -> Taken | None:
        """What of `step` is there already; None when nothing is. Before its forward pass."""
        logits, self._logits = self._logits, None
        if logits is None:
            return None
        row_of = {request_id: row for row, request_id in enumerate(self._parts)}
        rows: list[int] = []
        order: list[int] = []
        rest: list[ScheduledRequest] = []
        moves: list[tuple[int, int]] = []
        for part in step.scheduled:
            if self._is_computed(part):
                order.append(len(rows))
                rows.append(row_of[part.request.request_id])
                moves += self._move(part)
            else:
                rest.append(part)
                order += [-1] * ((1 + len(part.draft_token_ids)) if part.samples else 0)
        self._judge(len(rows), len(row_of))
        if not rows:
            return None
        behind = iter(range(len(rows), len(order)))
        order = [next(behind) if place < 0 else place for place in order]
        self._storage.copy_tokens(moves)
        # A copy where the rest is to be computed, which may write its logits to the same memory.
        if rest or rows != list(range(len(logits))):
            logits = logits[array_to_device(np.array(rows, np.int64), logits.device)]
        num_tokens = sum(part.num_new_tokens for part in rest)
        return Taken(replace(step, scheduled=rest, num_tokens=num_tokens), logits, order)

    def drop(self) -> None:
        """Forget what was computed."""
        self._planned = self._logits = None

    def _is_computed(self, part: ScheduledRequest) -> bool:
        guess = self._parts.get(part.request.request_id)
        if guess is None or guess.request is not part.request or guess.start != part.start:
            return False
        if part.num_new_tokens != 1 or not part.samples:
            return False
        index = part.start // self._storage.block_size
        block = guess.block_table[index]
        return block in self._storage.spare_blocks or block == part.block_table[index]

    def _move(self, part: ScheduledRequest) -> list[tuple[int, int]]:
        """Slots from and to which the token's keys and values have to be copied."""
        block_size = self._storage.block_size
        index, offset = divmod(part.start, block_size)
        written = self._parts[part.request.request_id].block_table[index]
        wanted = part.block_table[index]
        if written == wanted:
            return []
        return [(written * block_size + offset, wanted * block_size + offset)]

    def _judge(self, num_used: int, num_computed: int) -> None:
        """Rest for a while, longer each time, when less than half was of use."""
        if 2 * num_used >= num_computed:
            self._next_rest = 1
        else:
            self._rest = self._next_rest
            self._next_rest = min(2 * self._next_rest, _LONGEST_REST)


def _ends(part: ScheduledRequest, max_len: int) -> bool:
    """Whether the request ends with this step, whatever is sampled."""
    request = part.request
    most_output = request.params.max_tokens
    if most_output is not None and len(request.output_token_ids) + 1 >= most_output:
        return True
    return request.num_tokens + 1 >= min(request.max_len or max_len, max_len)
