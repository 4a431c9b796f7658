"""What an answer must look like, as it was asked for, with the bounds that hold at the door."""

import json
from dataclasses import dataclass
from typing import Any, Literal

from inference.errors import InvalidConstraint

Kind = Literal["json_object", "json_schema", "regex", "lark", "pieces"]

KINDS: tuple[Kind, ...] = ("json_object", "json_schema", "regex", "lark", "pieces")
# A schema made from a large typed API has some tens of thousands of characters.
MAX_SOURCE_BYTES = 128 * 1024
MAX_REGEX_BYTES = 8 * 1024
# The compiler recurses into a schema; it stops at 128 levels of JSON itself.
MAX_NESTING = 100


@dataclass(frozen=True, slots=True)
class Constraint:
    """One form that an answer is held to. Equal constraints share one compiled grammar."""

    kind: Kind
    # JSON of the schema or the pieces (see `pieces`), the regular expression, or the grammar; ""
    # for json_object.
    source: str = ""
    # The caller's name for it, which errors name.
    param: str = "response_format"
    # Leave out what the compiler does not know of a schema, instead of refusing it.
    is_lenient: bool = False

    @classmethod
    def of_json(
        cls,
        kind: Kind,
        value: Any,
        *,
        param: str = "response_format",
        is_lenient: bool = False,
    ) -> "Constraint":
        """Raises InvalidConstraint: it is no JSON, or nested too deeply."""
        try:
            source = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as exc:
            raise InvalidConstraint(
                f"{param} holds a schema that is no JSON: {exc}.", param=param
            ) from exc
        return cls(kind, source, param, is_lenient)

    def check(self) -> None:
        """Refuse what is too large to be compiled. Cheap: one pass over the text.

        Raises:
            InvalidConstraint: with the size and what is allowed.
        """
        if self.kind not in KINDS:
            raise self.refused(f"is of the kind {self.kind!r}; allowed are {', '.join(KINDS)}")
        if self.kind == "json_object":
            return
        if not self.source.strip():
            raise self.refused(f"holds an empty {self.word}")
        size = len(self.source.encode("utf-8", "replace"))
        most = MAX_REGEX_BYTES if self.kind == "regex" else MAX_SOURCE_BYTES
        if size > most:
            raise self.refused(f"holds a {self.word} of {size:,} bytes; at most {most:,} are taken")
        nesting = _nesting(self.source)
        if nesting > MAX_NESTING:
            raise self.refused(
                f"holds a {self.word} nested {nesting:,} levels deep; at most {MAX_NESTING} are "
                "taken"
            )

    @property
    def word(self) -> str:
        return {"regex": "regular expression", "lark": "grammar"}.get(self.kind, "JSON schema")

    def refused(self, why: str) -> InvalidConstraint:
        return InvalidConstraint(f"{self.param} {why}.", param=self.param)


def _nesting(text: str) -> int:
    """Deepest run of brackets, those in quotes and classes too: an upper bound is enough."""
    depth = deepest = 0
    for letter in text:
        if letter in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif letter in ")]}":
            depth = max(0, depth - 1)
    return deepest
