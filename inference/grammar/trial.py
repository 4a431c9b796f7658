"""A few answers begun for trial: what costs too much to follow shows before anything is queued.

Most of what would fail does so within some tokens, and always for the same: nested repetition that
may be counted in many ways at once. What shows later ends its own request as a refusal.
"""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from inference.grammar.constraint import Constraint
from inference.grammar.matcher import MatcherFailed, TokenMatcher

# Nested repetition that is too much shows by then.
_NUM_TOKENS = 40
# More than a schema made by hand or from types has.
_MAX_PATTERNS = 64
# Values of these are answers, not schemas.
_NOT_SCHEMAS = frozenset({"const", "enum", "default", "example", "examples"})


def try_out(new_matcher: Callable[[], TokenMatcher]) -> None:
    """Begin four answers, the same each time.

    The ends of a vocabulary differ most: single letters at one, the longest tokens at the other.

    Args:
        new_matcher: at the beginning of an answer.

    Raises:
        MatcherFailed: no answer fulfils it, or following it costs too much.
    """
    for pick in (_first, _last, random.Random(1).randrange, random.Random(2).randrange):
        matcher = new_matcher()
        mask = np.zeros(matcher.num_words, np.int32)
        taken: list[int] = []
        while len(taken) < _NUM_TOKENS:
            matcher.fill(taken, mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if not allowed.size:
                raise MatcherFailed("no answer fulfils it")
            taken.append(int(allowed[pick(allowed.size)]))
            if matcher.accept(taken[-1]):
                break


def patterns_of(constraint: Constraint) -> list[str]:
    """The regular expressions in a JSON schema or in pieces; none of another constraint."""
    if constraint.kind not in ("json_schema", "pieces"):
        return []
    found = dict.fromkeys(_patterns(json.loads(constraint.source)))
    return list(found)[:_MAX_PATTERNS]


def _patterns(node: Any) -> Iterator[str]:
    """Nesting is bounded by `Constraint.check`."""
    if isinstance(node, list):
        for each in node:
            yield from _patterns(each)
    elif isinstance(node, dict):
        for name, value in node.items():
            if name == "pattern" and isinstance(value, str):
                yield value
            elif name not in _NOT_SCHEMAS:
                yield from _patterns(value)


def _first(_size: int) -> int:
    return 0


def _last(size: int) -> int:
    return size - 1
