"""Makes the pool larger or smaller while requests run. No torch.

Larger: the storage first, then the blocks. Smaller: from the first moment no block above the new
end is given out; blocks up there that requests hold are copied below as room allows, and what finds
none is waited for; when nothing is left above, the memory is given back. No stream ends for it, and
no request loses a token. A pool is never made smaller than one accepted request may become long.

Owner: the engine thread, between two steps. All of it is O(blocks that move) but for the end.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from inference.errors import NotEnoughMemory
from inference.kv_cache.manager import KVCacheManager
from inference.outputs import Setting
from inference.request import Request

AUTO = "auto"
# Fewer tokens than this hold no conversation.
LEAST_TOKENS = 256
# More blocks cost more to keep track of than they could ever be of use.
MOST_BLOCKS = 1_000_000


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """What a pool's size means in memory, and how it is changed."""

    bytes_per_block: int
    # Memory that the weights leave, of which the pool takes a share; 0 when nobody can tell.
    budget_bytes: int
    # Copies whole blocks, (source, destination) each, at once.
    move: Callable[[Sequence[tuple[int, int]]], None]
    # Makes the storage this many blocks large; raises NotEnoughMemory and leaves it as it was.
    resize: Callable[[int], None]


def _cannot(*args: object) -> None:
    raise AssertionError("this pool's memory cannot be changed")


# Of a pool whose size is fixed.
FIXED = PoolMemory(bytes_per_block=1, budget_bytes=0, move=_cannot, resize=_cannot)


class PoolResizer:
    """`ask` when the setting changes, then `step` between steps while `is_due`."""

    def __init__(self, kv: KVCacheManager, memory: PoolMemory) -> None:
        self._kv = kv
        self._memory = memory
        self._num_at_load = kv.pool.num_blocks
        self._requested: float | str = AUTO
        self._target = self._num_at_load
        # Why the storage could not be made as large as asked.
        self._refusal = ""
        self.is_due = False

    @property
    def target(self) -> int:
        """Blocks that the pool is to have."""
        return self._target

    def ask(self, share: float | str) -> None:
        """Take over the wanted share of the memory that the weights leave, or "auto": as loaded."""
        if share == self._requested:
            return
        self._requested, self._refusal = share, ""
        self._target = self._num_at_load
        if share != AUTO and self._memory.budget_bytes:
            wanted = int(float(share) * self._memory.budget_bytes) // self._memory.bytes_per_block
            self._target = max(wanted, -(-LEAST_TOKENS // self._kv.block_size))
            self._target = min(self._target, MOST_BLOCKS)
        self.is_due = self._target != self._kv.pool.num_blocks

    def step(self, unfinished: Iterable[Request]) -> None:
        """Go as far as is possible now. Raises what a copy raises: then no block can be trusted."""
        pool = self._kv.pool
        if self._target >= pool.num_ids:
            self._grow()
            return
        floor = max(
            (self._kv.blocks_for(_longest(request)) for request in unfinished),
            default=0,
        )
        limit = max(self._target, floor)
        pool.set_limit(min(limit, pool.num_ids))
        moves = self._kv.move_below(pool.limit)
        if moves:
            self._memory.move(moves)
        if pool.limit == self._target and pool.num_held_above == 0:
            pool.cut()
            self._memory.resize(self._target)
            self.is_due = False

    def setting(self) -> Setting:
        """What was asked, what holds, and why they differ."""
        budget = self._memory.budget_bytes
        if not budget:
            why = "" if self._requested == AUTO else "this memory cannot be changed here"
            return Setting(self._requested, AUTO, why)
        num_blocks = self._kv.pool.num_blocks
        share = round(num_blocks * self._memory.bytes_per_block / budget, 3)
        if self._refusal:
            return Setting(self._requested, share, self._refusal)
        if self.is_due:
            left = self._kv.pool.num_held_above
            why = (
                f"{left:,} blocks above the new end are still held"
                if left
                else "a request that was accepted before may need more"
            )
            return Setting(self._requested, share, why)
        if self._requested == AUTO:
            return Setting(AUTO, share, "as the server chose when it loaded the model")
        return Setting(self._requested, share, self._rounded(share))

    def _rounded(self, share: float) -> str:
        if abs(share - float(self._requested)) < 0.001:
            return ""
        return f"{LEAST_TOKENS} tokens are the least, and {MOST_BLOCKS:,} blocks the most"

    def _grow(self) -> None:
        pool = self._kv.pool
        self.is_due = False
        pool.set_limit(pool.num_ids)
        if self._target == pool.num_ids:
            return
        try:
            self._memory.resize(self._target)
        except NotEnoughMemory as exc:
            self._refusal = str(exc)
            self._target = pool.num_ids
            return
        pool.extend(self._target)


def _longest(request: Request) -> int:
    """Tokens that an accepted request may come to."""
    most = request.params.max_tokens
    if most is None:
        return request.max_len
    return min(request.max_len, request.num_prompt_tokens + most)
