"""Where one constrained answer stands in its grammar. No torch.

Owner: the engine thread. The state follows from the answer's tokens alone, so a request that was
preempted goes on as if nothing had happened.
"""

import time
from collections.abc import Sequence
from typing import Protocol

import llguidance
import numpy as np
import numpy.typing as npt

# Processor time of one token's mask. Most take a thousandth of it; one that does not is a grammar
# made to stall the server, and only its own request ends.
MAX_MASK_S = 0.25

Mask = npt.NDArray[np.int32]


class MatcherFailed(Exception):
    """This grammar cannot go on; the message is for people."""


class Grammar(Protocol):
    """A compiled constraint; any number of answers may follow it at once."""

    def new_matcher(self) -> "TokenMatcher":
        """At the beginning of an answer."""


class TokenMatcher:
    """Follows one answer."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)
        self._num_tokens = 0

    @property
    def num_words(self) -> int:
        """Width of a mask: 32 tokens a word."""
        return self._num_words

    def fill(self, output_token_ids: Sequence[int], mask: Mask) -> None:
        """Which tokens may follow `output_token_ids`.

        Args:
            mask: [num_words] int32, contiguous; bit i of word w is the token 32 * w + i.

        Raises:
            MatcherFailed: the grammar is too costly, or the tokens do not fit it.
        """
        self._follow(output_token_ids)
        started = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise MatcherFailed(plain(self._matcher.get_error()))
        if time.thread_time() - started > MAX_MASK_S:
            raise MatcherFailed("working out the next token takes too long")

    def accept(self, token_id: int) -> bool:
        """Take a sampled token in; True when the grammar ends with it.

        Raises:
            MatcherFailed: see `fill`.
        """
        if not self._matcher.consume_token(token_id):
            raise MatcherFailed(plain(self._matcher.get_error()))
        self._num_tokens += 1
        return bool(self._matcher.is_stopped())

    def _follow(self, output_token_ids: Sequence[int]) -> None:
        """Usually nothing: `accept` was told each of these."""
        if self._num_tokens > len(output_token_ids):
            self._matcher.rollback(self._num_tokens - len(output_token_ids))
            self._num_tokens = len(output_token_ids)
        for token_id in output_token_ids[self._num_tokens :]:
            self.accept(token_id)


def plain(error: str) -> str:
    """The library's error for people; below its first line stands the parser's own state."""
    text = error.strip().split("<non-verbose/>")[0]
    if "NoExtension" in text:
        return "no answer fulfils it"
    if "too many" in text.lower():
        return (
            "it costs too much, since it can be fulfilled in too many ways at once. Nest fewer "
            "repetitions, or bound them lower"
        )
    lines = text.splitlines()
    return " ".join(lines[0].split())[:300].rstrip(".") if lines else "it is not valid"
