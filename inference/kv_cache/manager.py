"""Block tables: which blocks hold which request's tokens. No torch.

Invariants, asserted by `check_integrity`: a block that will still be written is in one table only;
a findable block holds exactly the tokens its content says; an ended request holds nothing.
Owner: the engine thread. Paging: arXiv:2309.06180.
"""

from collections.abc import Iterable, Iterator

from inference.kv_cache.block import BlockContent
from inference.kv_cache.block_pool import BlockPool, DigestFunction, block_digest_function
from inference.kv_cache.prefix_hits import HitCounters
from inference.request import Request, RequestStatus

# No private scope equals it: those carry a prefix of their own.
PUBLIC_SCOPE = "public"
_PRIVATE_PREFIX = "private:"


class KVCacheManager:
    """Requests to blocks. Cost of each call is in blocks touched, never in blocks of the pool."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        model_version: str,
        enable_prefix_cache: bool = True,
        digest: DigestFunction | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        # Baseline beside paging: every request takes room for this many tokens when it starts.
        # 0 is paging.
        self.reserve_tokens = 0
        self.hits = HitCounters()
        self._prefix_cache = enable_prefix_cache
        self._digest = digest or block_digest_function(model_version)
        self._tables: dict[str, list[int]] = {}
        # Chained digests of a live request's leading full blocks, as far as they were needed.
        self._digests: dict[str, list[bytes]] = {}
        # How many leading blocks of a table were offered to the cache.
        self._num_committed: dict[str, int] = {}

    # ---- reading

    def table(self, request_id: str) -> list[int]:
        """The request's own list: read it, copy it, do not change it."""
        return self._tables[request_id]

    def num_blocks_of(self, request_id: str) -> int:
        return len(self._tables.get(request_id, ()))

    def tables(self) -> Iterator[tuple[str, list[int]]]:
        yield from self._tables.items()

    def blocks_for(self, num_tokens: int) -> int:
        return -(-max(num_tokens, self.reserve_tokens) // self.block_size)

    # ---- starting

    def find_prefix(self, request: Request) -> list[int]:
        """Ids of cached blocks that hold the request's first tokens.

        At least one token is always left to compute, since the next one is sampled from it.
        """
        found: list[int] = []
        if not self._prefix_cache:
            return found
        for index in range((request.num_tokens - 1) // self.block_size):
            block = self.pool.find(self._digest_of(request, index), self._content(request, index))
            if block is None:
                break
            found.append(block.block_id)
        return found

    def num_unreferenced(self, block_ids: Iterable[int]) -> int:
        """How many of these can no longer be given out once they are used again."""
        blocks = self.pool.blocks
        return sum(blocks[block_id].ref_cnt == 0 for block_id in block_ids)

    def start(self, request: Request, prefix: list[int]) -> None:
        """Give the request a table that begins with `prefix`, as `find_prefix` returned it."""
        assert request.request_id not in self._tables, f"{request.request_id} has a table"
        self.pool.touch(prefix)
        self._tables[request.request_id] = list(prefix)
        self._num_committed[request.request_id] = len(prefix)
        request.num_computed_tokens = len(prefix) * self.block_size

    def count_hit(self, request: Request, prefix: list[int]) -> None:
        """A new request was found to begin with `prefix`; one that comes back finds its own."""
        if not prefix or request.status is RequestStatus.PREEMPTED:
            return
        index = len(prefix) - 1
        scope = "" if self._is_public(request, index) else request.cache_scope
        self.hits.count(self._digest_of(request, index), len(prefix) * self.block_size, scope)

    def fork(self, parent: Request, child: Request) -> tuple[int, int]:
        """Start `child`, which has the same prompt, on the blocks of `parent`'s computed prompt.

        The block with the prompt's last token is the only one that both write, so the child takes
        a copy of it. The caller checked that one block is available.

        Returns:
            (source, destination) block ids to copy before the child's first step.
        """
        assert parent.prompt_token_ids == child.prompt_token_ids, "a fork has its parent's prompt"
        assert parent.num_computed_tokens >= parent.num_prompt_tokens, "the prompt is not computed"
        num_shared = (child.num_prompt_tokens - 1) // self.block_size
        table = self._tables[parent.request_id]
        self.start(child, table[:num_shared])
        [copy] = self.pool.allocate(1)
        self._tables[child.request_id].append(copy)
        child.num_computed_tokens = child.num_prompt_tokens - 1
        return table[num_shared], copy

    # ---- running

    def room_for(self, request_id: str) -> int:
        """Tokens that the request's table could hold if it got every block there is."""
        num_blocks = len(self._tables[request_id]) + self.pool.num_available
        return num_blocks * self.block_size

    def allocate_slots(self, request: Request, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all; False changes nothing: the pool is short."""
        table = self._tables[request.request_id]
        missing = self.blocks_for(num_tokens) - len(table)
        if missing > self.pool.num_available:
            # A reservation that was set after its start takes nothing that is not there.
            missing = -(-num_tokens // self.block_size) - len(table)
        if missing <= 0:
            return True
        if missing > self.pool.num_available:
            return False
        table.extend(self.pool.allocate(missing))
        return True

    def commit(self, request: Request) -> None:
        """Make the blocks findable that the last step filled."""
        num_full = request.num_computed_tokens // self.block_size
        first = self._num_committed[request.request_id]
        if num_full <= first:
            return
        self._num_committed[request.request_id] = num_full
        if not self._prefix_cache:
            return
        table = self._tables[request.request_id]
        for index in range(first, num_full):
            digest = self._digest_of(request, index)
            self.pool.cache_full(table[index], digest, self._content(request, index))

    def distrust(self, request_id: str) -> None:
        """Let none of its blocks be found: what they hold gave no usable scores."""
        self.pool.forget_content(self._tables[request_id])

    # ---- making the pool smaller

    def move_below(self, limit: int) -> list[tuple[int, int]]:
        """Find new places for held blocks from `limit` on, as far as there is room.

        Returns:
            (source, destination) block ids, to copy at once; no block is in it twice.
        """
        moved: dict[int, int] = {}
        for table in self._tables.values():
            for index, block_id in enumerate(table):
                if block_id < limit:
                    continue
                if block_id not in moved:
                    if not self.pool.num_available:
                        break
                    [moved[block_id]] = self.pool.allocate(1)
                    self.pool.move(block_id, moved[block_id])
                table[index] = moved[block_id]
        return list(moved.items())

    # ---- ending

    def release(self, request_id: str) -> int:
        """Give the request's blocks back; returns how many it held. Idempotent."""
        table = self._tables.pop(request_id, None)
        if table is None:
            return 0
        del self._num_committed[request_id]
        self.pool.release(table)
        return len(table)

    def forget(self, request_id: str) -> None:
        """Release, and drop what is kept for a request that may come back. Idempotent."""
        self.release(request_id)
        self._digests.pop(request_id, None)

    def set_prefix_cache(self, enabled: bool) -> None:
        """Switched off, everything kept so far is forgotten."""
        self._prefix_cache = enabled
        if not enabled:
            self.pool.clear_cache()
            self.hits.clear()

    # ---- checking

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Assert every invariant, given the running requests. O(tokens); for tests."""
        running = {request.request_id: request for request in requests}
        assert running.keys() == self._tables.keys(), "tables of requests that do not run"
        self.pool.check_integrity(self._tables.values())
        for request_id, table in self._tables.items():
            request = running[request_id]
            assert request.num_computed_tokens <= len(table) * self.block_size
            for index, block_id in enumerate(table):
                block = self.pool.blocks[block_id]
                if (index + 1) * self.block_size > request.num_computed_tokens:
                    assert block.ref_cnt == 1, f"block {block_id} has two writers"
                    assert block.digest is None, f"block {block_id} is findable, not full"
                elif block.content is not None:
                    assert block.content == self._content(request, index), f"block {block_id}"

    def _digest_of(self, request: Request, index: int) -> bytes:
        digests = self._digests.setdefault(request.request_id, [])
        while len(digests) <= index:
            content = self._content(request, len(digests))
            parent = digests[-1] if digests else b""
            digests.append(self._digest(content.scope, parent, content.token_ids))
        return digests[index]

    def _is_public(self, request: Request, index: int) -> bool:
        return (index + 1) * self.block_size <= request.num_public_prefix_tokens

    def _content(self, request: Request, index: int) -> BlockContent:
        start = index * self.block_size
        end = start + self.block_size
        is_public = self._is_public(request, index)
        scope = PUBLIC_SCOPE if is_public else _PRIVATE_PREFIX + request.cache_scope
        return BlockContent(scope, start, tuple(request.token_ids_between(start, end)))
