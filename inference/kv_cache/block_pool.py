"""All KV blocks of the engine: reference counts, the free queue, and the map of full blocks.

Paging: Kwon et al. 2023, arXiv:2309.06180. Prefix reuse: Zheng et al. 2023 (arXiv:2312.07104), with
a map of chained digests in place of their radix tree: a block's digest covers its parent's, so one
dictionary holds every prefix. Owner: the engine thread. No torch.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence

from inference.kv_cache.block import BlockContent, FreeBlockQueue, KVCacheBlock

# (scope, parent digest or b"" at the start, token ids) -> digest
DigestFunction = Callable[[str, bytes, Sequence[int]], bytes]


def block_digest_function(model_version: str) -> DigestFunction:
    """Digest of a block, given everything before it.

    Each field is preceded by its tag and its length, so no two different lists of fields feed the
    same bytes to the hash. 256 bits of BLAKE2b: a collision cannot be made on purpose.
    """
    hashers: dict[str, hashlib.blake2b] = {}

    def scope_hasher(scope: str) -> "hashlib.blake2b":
        if len(hashers) > 10_000:
            hashers.clear()
        hasher = hashlib.blake2b(digest_size=32)
        hasher.update(_framed(b"model", model_version.encode()))
        hasher.update(_framed(b"scope", scope.encode()))
        hashers[scope] = hasher
        return hasher

    def digest(scope: str, parent: bytes, token_ids: Sequence[int]) -> bytes:
        hasher = (hashers.get(scope) or scope_hasher(scope)).copy()
        hasher.update(_framed(b"parent", parent))
        hasher.update(_framed(b"tokens", array("q", token_ids).tobytes()))
        return hasher.digest()

    return digest


def _framed(tag: bytes, value: bytes) -> bytes:
    return b"%d:%s%d:%s" % (len(tag), tag, len(value), value)


class BlockPool:
    """Gives out blocks, counts their holders, and finds full ones again by content."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        # Blocks from here on are not given out any more.
        self.limit = num_blocks
        # Those of them that nobody holds.
        self._retired: dict[int, KVCacheBlock] = {}
        self.num_evicted = 0
        # Held by two tables or more.
        self.num_shared = 0
        self._queue = FreeBlockQueue(self.blocks)
        self._by_digest: dict[bytes, KVCacheBlock] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks in use or to be given out."""
        return len(self.blocks) - len(self._retired)

    @property
    def num_ids(self) -> int:
        """Every block's id is lower."""
        return len(self.blocks)

    @property
    def num_held_above(self) -> int:
        """Blocks from the limit on that somebody still holds."""
        return len(self.blocks) - self.limit - len(self._retired)

    @property
    def num_free(self) -> int:
        return self._queue.num_free

    @property
    def num_cached(self) -> int:
        return self._queue.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that can be given out: the free ones and those that may be evicted."""
        return self._queue.num_free + self._queue.num_cached

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def allocate(self, count: int) -> list[int]:
        """Block ids with one reference each; the caller checked `num_available`."""
        assert count <= self.num_available, f"{count} blocks asked, {self.num_available} left"
        block_ids = []
        for _ in range(count):
            block = self._queue.pop()
            if block.digest is not None:
                self._forget(block)
                self.num_evicted += 1
            block.ref_cnt = 1
            block_ids.append(block.block_id)
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each; a cached block is used again from here on."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_cnt == 0:
                self._queue.remove(block)
            elif block.ref_cnt == 1:
                self.num_shared += 1
            block.ref_cnt += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each.

        Give them in the order of the table: its end is queued first, so that the start of a
        prompt, which more requests can share, is evicted last.
        """
        for block_id in reversed(block_ids):
            block = self.blocks[block_id]
            assert block.ref_cnt > 0, f"block {block_id} released more often than it was held"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._give_back(block)
            elif block.ref_cnt == 1:
                self.num_shared -= 1

    def find(self, digest: bytes, content: BlockContent) -> KVCacheBlock | None:
        """The block with this digest, if it also holds exactly this content."""
        block = self._by_digest.get(digest)
        return block if block is not None and block.content == content else None

    def cache_full(self, block_id: int, digest: bytes, content: BlockContent) -> None:
        """Make a full block findable. The first block with a digest stays the one that is found."""
        block = self.blocks[block_id]
        if digest in self._by_digest or block.digest is not None:
            return
        block.digest = digest
        block.content = content
        self._by_digest[digest] = block

    def forget_content(self, block_ids: Iterable[int]) -> None:
        """Make held blocks, which stay with their holders, no longer findable."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            assert block.ref_cnt > 0, f"block {block_id} is held by nobody"
            if block.digest is not None:
                self._forget(block)

    def clear_cache(self) -> None:
        """Forget every content; cached blocks become free, used ones stay with their holders."""
        unreferenced = self._queue.take_all_cached()
        for block in list(self._by_digest.values()):
            self._forget(block)
        for block in unreferenced:
            self._queue.push(block)

    # ---- making it larger or smaller

    def set_limit(self, limit: int) -> None:
        """Give out no block from `limit` on; lower ones that were retired are there again."""
        if limit == self.limit:
            return
        self.limit = limit
        for block in self._queue.take_from(limit):
            self._give_back(block)
        for block_id in [each for each in self._retired if each < limit]:
            self._queue.push(self._retired.pop(block_id))

    def extend(self, num_blocks: int) -> None:
        """Have this many blocks, all to be given out; more than before."""
        assert self.limit == len(self.blocks) < num_blocks, "a pool is extended at its end"
        new = [KVCacheBlock(block_id) for block_id in range(len(self.blocks), num_blocks)]
        self.blocks += new
        self.limit = num_blocks
        for block in reversed(new):
            self._queue.push(block)

    def cut(self) -> None:
        """Forget the blocks from the limit on, which nobody holds any more."""
        assert self.num_held_above == 0, "a block that is held cannot be forgotten"
        del self.blocks[self.limit :]
        self._retired.clear()

    def move(self, source_id: int, destination_id: int) -> None:
        """Let a block that was just allocated take the place of one above the limit; the caller
        copies what it holds and puts it into the tables."""
        source, destination = self.blocks[source_id], self.blocks[destination_id]
        assert destination.ref_cnt == 1, f"block {destination_id} is no new one"
        destination.ref_cnt, source.ref_cnt = source.ref_cnt, 0
        if source.digest is not None:
            destination.digest, destination.content = source.digest, source.content
            self._by_digest[source.digest] = destination
            source.digest = source.content = None
        self._retired[source_id] = source

    def _give_back(self, block: KVCacheBlock) -> None:
        if block.block_id < self.limit:
            self._queue.push(block)
            return
        if block.digest is not None:
            self._forget(block)
            self.num_evicted += 1
        self._retired[block.block_id] = block

    def cached_ids(self) -> list[int]:
        return self._queue.cached_ids()

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert every invariant, given all block tables. O(blocks); for tests and debugging."""
        holders = [0] * len(self.blocks)
        for table in tables:
            assert len(set(table)) == len(table), f"a table holds a block twice: {table}"
            for block_id in table:
                holders[block_id] += 1
        free, cached = set(self._queue.free_ids()), set(self._queue.cached_ids())
        assert not free & cached, f"free and cached at once: {free & cached}"
        for block in self.blocks:
            block_id = block.block_id
            assert block.ref_cnt == holders[block_id], (
                f"block {block_id}: {block.ref_cnt} references, {holders[block_id]} tables"
            )
            is_retired = block_id in self._retired
            assert not is_retired or block_id >= self.limit, f"block {block_id} is retired"
            assert not is_retired or block.digest is None, f"block {block_id} is findable"
            is_unreferenced = block_id in free or block_id in cached or is_retired
            if block_id >= self.limit:
                assert block_id not in free | cached, f"block {block_id} would be given out"
            assert is_unreferenced == (block.ref_cnt == 0), f"block {block_id} is misplaced"
            assert (block.digest is None) == (block.content is None), f"block {block_id}: half"
            if block_id in free:
                assert block.digest is None, f"block {block_id} is free and findable"
            if block_id in cached:
                assert block.digest is not None, f"block {block_id} is cached and not findable"
            if block.digest is not None:
                assert self._by_digest.get(block.digest) is block, f"block {block_id} is unmapped"
        findable = sum(block.digest is not None for block in self.blocks)
        assert findable == len(self._by_digest), "the map holds a block that was given out"
        assert self.num_shared == sum(count > 1 for count in holders), "shared blocks miscounted"
        held = sum(count > 0 for count in holders)
        assert len(free) + len(cached) + held == self.num_blocks
        assert self.num_held_above == sum(count > 0 for count in holders[self.limit :])

    def _forget(self, block: KVCacheBlock) -> None:
        assert block.digest is not None, f"block {block.block_id} has no content to forget"
        del self._by_digest[block.digest]
        block.digest = None
        block.content = None
