"""Text of a message on its way through a chat template. No torch.

Some characters of such a text are masked with private characters, so that whatever the template
does to it, no marker of the model can be found in it afterwards. The masks are taken off after the
markers of the template itself have been found. What a template asks of the text (does it hold
"</think>"?) is answered as if nothing were masked.
"""

from collections.abc import Iterable, Mapping
from typing import Any, SupportsIndex

from inference.text.tokenizer import (
    END_MARK,
    MASK_BASE,
    any_of,
    without_reserved,
    without_surrogates,
)


class Masker:
    """Masks for one vocabulary's markers. Immutable; any thread may use it."""

    def __init__(self, markers: Iterable[str]) -> None:
        self._markers = [marker for marker in markers if marker]
        self._pattern = any_of(self._markers)
        alphabet = sorted({character for marker in self._markers for character in marker})
        self._mask = {character: chr(MASK_BASE + n) for n, character in enumerate(alphabet[:2000])}
        # For str.translate.
        self.unmask: Mapping[int, int] = {
            ord(mask): ord(character) for character, mask in self._mask.items()
        }
        self._heads = {marker[:n] for marker in self._markers for n in range(1, len(marker))}
        self._tails = {marker[n:] for marker in self._markers for n in range(1, len(marker))}
        self._longest = max(map(len, self._markers), default=0)

    def wrap(self, value: Any) -> Any:
        """Every text in `value` (dicts and lists are copied) as untrusted text."""
        if isinstance(value, str):
            return UntrustedText(self.mask(without_reserved(without_surrogates(value))), self)
        if isinstance(value, Mapping):
            return {self.wrap(key): self.wrap(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.wrap(entry) for entry in value]
        return value

    def with_end_mark(self, text: str) -> "UntrustedText":
        """A wrapped text, its end marked so that it can be found in what a template writes."""
        return UntrustedText(text + END_MARK, self)

    def mask_whole(self, text: str) -> str:
        """Break every marker in the text by masking its first character."""
        while self._pattern.search(text):
            text = self._pattern.sub(lambda match: self._first_masked(match.group()), text)
        return text

    def mask(self, text: str) -> str:
        """Also break what would become a marker together with text before or after it."""
        text = self.mask_whole(text)
        core = text.strip()
        if not core:
            return text
        start = len(text) - len(text.lstrip())
        end = start + len(core)
        if self._is_inner(core) or self._starts_with_tail(core):
            text = text[:start] + self._first_masked(text[start:])
        if self._ends_with_head(core):
            text = text[: end - 1] + self._first_masked(text[end - 1 :])
        return text

    def _first_masked(self, text: str) -> str:
        return self._mask.get(text[0], text[0]) + text[1:]

    def _is_inner(self, core: str) -> bool:
        return len(core) < self._longest and any(core in marker for marker in self._markers)

    def _starts_with_tail(self, core: str) -> bool:
        return any(core[:n] in self._tails for n in range(1, min(len(core), self._longest) + 1))

    def _ends_with_head(self, core: str) -> bool:
        return any(core[-n:] in self._heads for n in range(1, min(len(core), self._longest) + 1))


class UntrustedText(str):
    """A masked text that answers questions about itself as if it were not masked.

    An operation that is not written here, joining included, gives a plain text in which its part is
    still masked.
    """

    __slots__ = ("_masker",)
    _masker: Masker

    def __new__(cls, masked: str, masker: Masker) -> "UntrustedText":
        text = super().__new__(cls, masked)
        text._masker = masker
        return text

    def __str__(self) -> str:
        return self

    def _made(self, text: str) -> "UntrustedText":
        return UntrustedText(self._masker.mask(text), self._masker)

    def _asked(self, text: Any) -> Any:
        if isinstance(text, tuple):
            return tuple(self._asked(one) for one in text)
        return self._masker.mask_whole(text) if isinstance(text, str) else text

    def __contains__(self, part: object) -> bool:
        return isinstance(part, str) and super().__contains__(self._asked(part))

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        return self._made(super().__getitem__(key))

    def startswith(self, prefix: Any, *where: Any) -> bool:
        return super().startswith(self._asked(prefix), *where)

    def endswith(self, suffix: Any, *where: Any) -> bool:
        return super().endswith(self._asked(suffix), *where)

    def find(self, part: str, *where: Any) -> int:
        return super().find(self._asked(part), *where)

    def rfind(self, part: str, *where: Any) -> int:
        return super().rfind(self._asked(part), *where)

    def count(self, part: str, *where: Any) -> int:
        return super().count(self._asked(part), *where)

    def strip(self, characters: str | None = None) -> str:
        return self._made(super().strip(characters))

    def lstrip(self, characters: str | None = None) -> str:
        return self._made(super().lstrip(characters))

    def rstrip(self, characters: str | None = None) -> str:
        return self._made(super().rstrip(characters))

    def split(self, separator: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return [self._made(part) for part in super().split(self._asked(separator), maxsplit)]

    def rsplit(self, separator: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return [self._made(part) for part in super().rsplit(self._asked(separator), maxsplit)]

    def splitlines(self, keepends: bool = False) -> list[str]:
        return [self._made(part) for part in super().splitlines(keepends)]

    def partition(self, separator: str) -> tuple[str, str, str]:
        before, found, after = super().partition(self._asked(separator))
        return self._made(before), self._made(found), self._made(after)

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        return self._made(super().replace(self._asked(old), self._asked(new), count))

    def removeprefix(self, prefix: str) -> str:
        return self._made(super().removeprefix(self._asked(prefix)))

    def removesuffix(self, suffix: str) -> str:
        return self._made(super().removesuffix(self._asked(suffix)))

    def lower(self) -> str:
        return self._made(super().lower())

    def upper(self) -> str:
        return self._made(super().upper())

    def title(self) -> str:
        return self._made(super().title())

    def capitalize(self) -> str:
        return self._made(super().capitalize())
