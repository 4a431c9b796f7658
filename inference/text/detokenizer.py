"""Token ids of one request -> text as it comes: whole characters only, stop strings never shown.

The cost of a token does not depend on how many came before it. No torch.
"""

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from inference.outputs import TextLogprob, TokenLogprobs
from inference.text.stop_strings import StopStrings
from inference.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Detokenized:
    """What became showable. `logprobs` has one entry for each token whose text is settled."""

    text: str = ""
    logprobs: list[TextLogprob] = field(default_factory=list)


@dataclass(slots=True)
class _Pending:
    """A token with logprobs whose text is not settled yet."""

    entry: TextLogprob
    # Bytes of earlier tokens that wait for this one to complete a character.
    head: bytes
    # Positions in the decoded text: where this token starts, and behind the last character that it
    # has a part in.
    start_char: int
    end_char: int


class Detokenizer:
    """Feed tokens in order, then call `finish` once. Not for use by two threads at a time.

    The text is the same however the tokens are grouped. Bytes at the very end that make no whole
    character are left out; other bytes that are no UTF-8 become U+FFFD.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        ending_ids: Iterable[int] = (),
        min_tokens: int = 0,
        strip_first_space: bool = False,
    ) -> None:
        """
        Args:
            ending_ids: ids that end the request; like control tokens they have no text.
            min_tokens: before this many tokens neither ids nor stop strings end it.
            strip_first_space: drop one space at the very start, which some vocabularies put there.
        """
        self._tokenizer = tokenizer
        self._ending_ids = frozenset(ending_ids)
        self._min_tokens = min_tokens
        self._stops = StopStrings(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_first_space = strip_first_space
        self._num_decoded_chars = 0
        self._num_shown_chars = 0
        self._pending: deque[_Pending] = deque()
        self.num_tokens = 0

    @property
    def stop_found(self) -> str | None:
        """The stop string that ended the text. Tokens fed after it are not counted."""
        return self._stops.found

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> Detokenized:
        """Take the next tokens; `logprobs` is parallel to them, or empty."""
        shown: list[str] = []
        entries: list[TextLogprob] = []
        for number, token_id in enumerate(token_ids):
            if self._stops.found is not None:
                break
            self.num_tokens += 1
            raw = self._visible_bytes(token_id)
            head, start_char = self._decoder.getstate()[0], self._num_decoded_chars
            text = self._decoder.decode(raw)
            self._num_decoded_chars += len(text)
            if logprobs:
                entry = self._entry(token_id, raw, logprobs[number])
                unfinished = bool(self._decoder.getstate()[0])
                end_char = self._num_decoded_chars + unfinished
                self._pending.append(_Pending(entry, head, start_char, end_char))
            now = text if self.num_tokens < self._min_tokens else self._stops.feed(text)
            self._num_shown_chars += len(now)
            shown.append(now)
            entries += self._settled()
        return Detokenized("".join(shown), entries)

    def finish(self) -> Detokenized:
        """No more tokens come: what was held back, and the rest of the logprobs."""
        text = "" if self._stops.found is not None else self._stops.finish()
        self._num_shown_chars += len(text)
        entries = self._settled()
        # What is left lies behind the stop, or in a character that was never completed.
        for pending in self._pending:
            entries.append(self._clipped(pending))
        self._pending.clear()
        return Detokenized(text, entries)

    def _visible_bytes(self, token_id: int) -> bytes:
        if token_id in self._tokenizer.hidden_ids:
            return b""
        if token_id in self._ending_ids and self.num_tokens >= self._min_tokens:
            return b""
        raw = self._tokenizer.token_bytes(token_id)
        if self._strip_first_space and raw:
            self._strip_first_space = False
            return raw.removeprefix(b" ")
        return raw

    # ---- log probabilities

    def _entry(self, token_id: int, raw: bytes, logprobs: TokenLogprobs) -> TextLogprob:
        return TextLogprob(
            self._name(token_id),
            raw,
            logprobs.token_logprob,
            [
                (self._name(top_id), self._tokenizer.token_bytes(top_id), logprob)
                for top_id, logprob in logprobs.top
            ],
        )

    def _name(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def _settled(self) -> list[TextLogprob]:
        done = []
        while self._pending and self._pending[0].end_char <= self._num_shown_chars:
            done.append(self._pending.popleft().entry)
        return done

    def _clipped(self, pending: _Pending) -> TextLogprob:
        """The entry with only those of its bytes that were shown."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(pending.head)
        position = pending.start_char
        kept = bytearray()
        for byte in pending.entry.token_bytes:
            position += len(decoder.decode(bytes([byte])))
            # The character that this byte has a part in.
            character = position if decoder.getstate()[0] else position - 1
            if character < self._num_shown_chars:
                kept.append(byte)
        entry = pending.entry
        return TextLogprob(entry.token, bytes(kept), entry.logprob, entry.top)
