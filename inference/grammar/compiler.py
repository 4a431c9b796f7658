"""Constraints to grammars, by llguidance (Earley parser over a lexer of regular expressions).

Compiling happens on threads of its own: neither the engine nor a socket waits for it, and a bad
schema is refused before anything is queued. Three bounds hold: size and nesting of the source
(`Constraint.check`), the library's own limits, and processor time.

A lexer grows while answers follow it and never recovers from a limit, and copies of a matcher share
one. So every request gets a lexer of its own: what one answer costs is never another's failure.
"""

import asyncio
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance

from inference.errors import QueueFull
from inference.grammar.constraint import Constraint
from inference.grammar.matcher import MatcherFailed, TokenMatcher, plain
from inference.grammar.pieces import lark_of
from inference.grammar.trial import patterns_of, try_out
from inference.text.tokenizer import Tokenizer

_MAX_KNOWN = 256
_NUM_THREADS = 2
_MAX_PENDING = 256
# Processor time of compiling and trying out; most schemas take a few milliseconds.
_MAX_COMPILE_S = 0.5
# How long a caller waits, on a machine that has other things to do as well.
_MAX_WAIT_S = 10.0
# Models drift into white space where a grammar lets them: a line break and an indent is enough.
_WHITE_SPACE = r"(\r?\n[ \t]{0,20}|[ \t]{1,20})"


def _limits(step_lexer_fuel: int) -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=step_lexer_fuel,
        step_max_items=50_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


# A step of answers may cost twice what one of the trial may: what passes it has room.
_TRIAL_LIMITS = _limits(300_000)
_LIMITS = _limits(600_000)


class CompiledGrammar:
    """See `matcher.Grammar`. Of one request, whose choices share its lexer."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def new_matcher(self) -> TokenMatcher:
        return TokenMatcher(self._matcher.deep_copy(), self._vocab_size)


class _Vocabulary:
    """The tokenizer, under the names that llguidance asks for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = [tokenizer.token_bytes(n) for n in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.hidden_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8"))


class GrammarCompiler:
    """For one tokenizer. `compile` belongs to an event loop, `compile_now` to any thread."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """`vocab_size` is the model's: ids at or past it are never allowed."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = [n for n in eos_token_ids if n < tokenizer.vocab_size]
        self._lock = threading.Lock()
        self._library: llguidance.LLTokenizer | None = None
        # Those that were tried out and found good, the one asked for longest ago first.
        self._known: OrderedDict[Constraint, None] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self._num_pending = 0

    async def compile(self, constraint: Constraint) -> CompiledGrammar:
        """
        Raises:
            InvalidConstraint: it cannot be compiled; the message says why.
            QueueFull: too many others are being compiled.
        """
        constraint.check()
        if self._num_pending >= _MAX_PENDING:
            raise QueueFull(
                "The server is busy: too many schemas wait to be read. Try again in a second.",
                retry_after_s=1.0,
            )
        self._num_pending += 1
        future = asyncio.get_running_loop().run_in_executor(
            self._threads(), self.compile_now, constraint
        )
        future.add_done_callback(self._on_compiled)
        done, _ = await asyncio.wait([future], timeout=_MAX_WAIT_S)
        if not done:
            raise constraint.refused(f"holds a {constraint.word} that takes too long to compile")
        return future.result()

    def compile_now(self, constraint: Constraint) -> CompiledGrammar:
        """`compile` on the calling thread."""
        constraint.check()
        self._loaded()
        try:
            if not self._is_known(constraint):
                self._try_out(constraint)
            grammar = self._compiled(constraint, _LIMITS)
        except (ValueError, MatcherFailed) as exc:
            why = f"holds a {constraint.word} that cannot be followed: {plain(str(exc))}"
            raise constraint.refused(why) from exc
        with self._lock:
            self._known[constraint] = None
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        return grammar

    def warm_up(self) -> None:
        """Prepare the vocabulary in the background, which takes up to a second."""
        self._threads().submit(self._loaded)

    def _try_out(self, constraint: Constraint) -> None:
        """
        Raises:
            MatcherFailed, ValueError: it is not valid, or costs too much to follow.
            InvalidConstraint: finding that out takes too long.
        """
        started = time.thread_time()
        try_out(self._compiled(constraint, _TRIAL_LIMITS).new_matcher)
        # Each by itself too: a trial of the whole hardly gets past its first free text.
        for pattern in patterns_of(constraint):
            if time.thread_time() - started > _MAX_COMPILE_S:
                break
            form = {"type": "string", "pattern": pattern}
            alone = Constraint.of_json("json_schema", form, is_lenient=True)
            try_out(self._compiled(alone, _TRIAL_LIMITS).new_matcher)
        if time.thread_time() - started > _MAX_COMPILE_S:
            raise constraint.refused(f"holds a {constraint.word} that takes too long to compile")

    def _compiled(
        self, constraint: Constraint, limits: llguidance.LLParserLimits
    ) -> CompiledGrammar:
        library = self._loaded()
        matcher = llguidance.LLMatcher(library, _source(constraint), log_level=0, limits=limits)
        if matcher.is_error():
            raise MatcherFailed(matcher.get_error())
        return CompiledGrammar(matcher, library.vocab_size)

    def _is_known(self, constraint: Constraint) -> bool:
        with self._lock:
            if constraint not in self._known:
                return False
            self._known.move_to_end(constraint)
            return True

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
            return self._pool

    def _on_compiled(self, future: "asyncio.Future[CompiledGrammar]") -> None:
        self._num_pending -= 1
        if not future.cancelled():
            future.exception()

    def _loaded(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._library is None:
                tokenizer = self._tokenizer
                eos = self._eos_token_ids or [min(tokenizer.hidden_ids, default=0)]
                self._library = llguidance.LLTokenizer(
                    _Vocabulary(tokenizer, eos[0]),  # type: ignore[arg-type]
                    n_vocab=max(tokenizer.vocab_size, self._vocab_size),
                    eos_token=eos,
                )
            return self._library


def _source(constraint: Constraint) -> str:
    """The library's form of it. Raises ValueError for what is no JSON object."""
    matcher = llguidance.LLMatcher
    if constraint.kind == "regex":
        return matcher.grammar_from_regex(constraint.source)
    if constraint.kind == "lark":
        return matcher.grammar_from_lark(constraint.source)
    if constraint.kind == "pieces":
        pieces = json.loads(constraint.source)
        return matcher.grammar_from_lark(lark_of(pieces, _json_options, constraint.refused))
    schema = '{"type": "object"}' if constraint.kind == "json_object" else constraint.source
    # Last, so that a schema cannot set them aside by naming them itself.
    overrides: Any = _json_options(constraint.is_lenient)
    return matcher.grammar_from_json_schema(schema, overrides=overrides)


def _json_options(is_lenient: bool) -> dict[str, Any]:
    return {
        "whitespace_flexible": True,
        "whitespace_pattern": _WHITE_SPACE,
        "lenient": is_lenient,
    }
