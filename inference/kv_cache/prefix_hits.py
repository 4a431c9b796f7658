"""How often each beginning of a prompt was found in the cache. No torch.

Counted by the deepest block that was found, so a system prompt counts for all who begin with it,
and a conversation for each turn that goes on from the one before. Owner: the engine thread.
"""

import heapq
from collections import OrderedDict
from dataclasses import dataclass

# Beginnings that are remembered; the one found longest ago is forgotten first.
_MAX_KEPT = 256


@dataclass(slots=True)
class PrefixHits:
    """One beginning of prompts."""

    num_tokens: int
    # Who may find it: a scope that the server chose, or "" for the server's own text.
    scope: str
    num_hits: int = 0

    @property
    def num_tokens_saved(self) -> int:
        return self.num_tokens * self.num_hits


class HitCounters:
    def __init__(self) -> None:
        # By the digest of its last block, the one found longest ago first.
        self._by_digest: OrderedDict[bytes, PrefixHits] = OrderedDict()

    def count(self, digest: bytes, num_tokens: int, scope: str) -> None:
        """A prompt was found to begin with these tokens."""
        found = self._by_digest.get(digest)
        if found is None:
            found = self._by_digest[digest] = PrefixHits(num_tokens, scope)
            if len(self._by_digest) > _MAX_KEPT:
                self._by_digest.popitem(last=False)
        found.num_hits += 1
        self._by_digest.move_to_end(digest)

    def top(self, limit: int) -> list[PrefixHits]:
        """Those that saved the most tokens, the first most. O(kept)."""
        kept = self._by_digest.values()
        return heapq.nlargest(limit, kept, key=lambda each: each.num_tokens_saved)

    def clear(self) -> None:
        self._by_digest.clear()
