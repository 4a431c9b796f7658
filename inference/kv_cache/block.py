"""One KV block and the order in which unreferenced blocks are given out. No torch.

Owner: the engine thread. A block is in exactly one of three places: held by at least one block
table (used), unreferenced with content worth keeping (cached), or unreferenced and empty (free).
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple


class BlockContent(NamedTuple):
    """What a full block holds, kept beside its digest so that a hit compares the content too."""

    scope: str
    # Position of the block's first token.
    start: int
    token_ids: tuple[int, ...]


@dataclass(eq=False, slots=True)
class KVCacheBlock:
    """Compared by identity."""

    block_id: int
    # Number of block tables that hold it.
    ref_cnt: int = 0
    # Both set once the block is full and findable, both None otherwise.
    digest: bytes | None = None
    content: BlockContent | None = None


class FreeBlockQueue:
    """Unreferenced blocks: empty ones go out first, then the cached one unused for longest.

    Every operation is O(1).
    """

    def __init__(self, blocks: list[KVCacheBlock]) -> None:
        # Last in, first out: a block just given back is warm.
        self._free = {block.block_id: block for block in reversed(blocks)}
        # Least recently used first.
        self._cached: OrderedDict[int, KVCacheBlock] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def push(self, block: KVCacheBlock) -> None:
        queue = self._free if block.digest is None else self._cached
        queue[block.block_id] = block

    def pop(self) -> KVCacheBlock:
        """The next block to give out; its `digest` is still set when it must be evicted."""
        if self._free:
            return self._free.popitem()[1]
        return self._cached.popitem(last=False)[1]

    def remove(self, block: KVCacheBlock) -> None:
        """Take a cached block out because a request hit it."""
        del self._cached[block.block_id]

    def take_from(self, first_id: int) -> list[KVCacheBlock]:
        """Take out every block with this id or a higher one. O(blocks here)."""
        taken = [
            block
            for queue in (self._free, self._cached)
            for block in queue.values()
            if block.block_id >= first_id
        ]
        for block in taken:
            (self._free if block.digest is None else self._cached).pop(block.block_id)
        return taken

    def take_all_cached(self) -> list[KVCacheBlock]:
        blocks = list(self._cached.values())
        self._cached.clear()
        return blocks

    def cached_ids(self) -> list[int]:
        return list(self._cached)

    def free_ids(self) -> list[int]:
        return list(self._free)
