"""Text <-> token ids, with the rule that text never becomes a control token by itself. No torch.

Control tokens ("markers": turn borders and the like) come only from trusted text, where this module
finds them itself. The library below is told to treat them as plain text always. A marker that was
found goes through the library as a guard character, so that the text around it is split exactly as
if the marker stood there.
"""

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from inference.errors import ModelLoadError

# Private-use characters that are replaced wherever they come in from outside.
GUARD = "\U0010fffd"
END_MARK = "\U0010fffc"
MASK_BASE = 0x10F800
_RESERVED = re.compile(f"[{chr(MASK_BASE)}-{GUARD}]")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Texts of more characters for each token that may be are counted piece by piece first.
_LIKELY_CHARS = 16
_LEAST_PIECE = 4096
_CONTROL_LOOK = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)


def without_reserved(text: str) -> str:
    """Text from outside, without the private characters that this package uses itself."""
    return _RESERVED.sub("\ufffd", text)


def without_surrogates(text: str) -> str:
    """JSON can carry lone surrogates, which are no characters; each becomes U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class TextTooLong(Exception):
    """A text of far more tokens than are allowed: the first `num_tokens` of them were counted."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens


@dataclass(frozen=True, slots=True)
class Marker:
    """A token that steers the model when it stands in trusted text."""

    text: str
    token_id: int
    # It swallows the white space before or after it.
    lstrip: bool
    rstrip: bool


class Tokenizer:
    """Immutable after loading; any thread may use it. Long texts are encoded without the GIL."""

    def __init__(self, document: dict[str, Any], config: Mapping[str, Any], template: str = ""):
        """`document` is tokenizer.json, `config` tokenizer_config.json, `template` Jinja source."""
        added = _added_tokens(document, config)
        self.markers: Mapping[str, Marker] = {
            token["content"]: Marker(
                token["content"],
                token["id"],
                bool(token.get("lstrip")),
                bool(token.get("rstrip")),
            )
            for token in added
            if _is_marker(token, template)
        }
        # Ids that never show as text in an answer.
        self.hidden_ids = frozenset(token["id"] for token in added if token.get("special"))
        self._literal = {token["id"]: token["content"] for token in added}
        self._library = _load_library(document, added, set(self.markers))
        self._kind, self.strips_first_space = _decoder_kind(document)
        # Ids at or past this do not exist.
        self.vocab_size = 1 + max(self._library.get_vocab(with_added_tokens=True).values())
        self._library.add_tokens([tokenizers.AddedToken(GUARD, special=False, normalized=False)])
        self._guard_id = self._library.token_to_id(GUARD)
        self._marker_ids = frozenset(marker.token_id for marker in self.markers.values())
        self._marker_pattern = any_of(self.markers)
        self.named_tokens = _named_tokens(config)
        self.prefix_ids = self._find_prefix(config)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_dir(cls, model_dir: Path) -> "Tokenizer":
        """Load the tokenizer of a model folder.

        Raises:
            ModelLoadError: tokenizer.json is missing, broken, or of a kind that is not supported.
        """
        path = model_dir / "tokenizer.json"
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            config_path = model_dir / "tokenizer_config.json"
            config = json.loads(config_path.read_text("utf-8")) if config_path.exists() else {}
            return cls(document, config, read_template_source(model_dir) or "")
        except FileNotFoundError:
            raise ModelLoadError(f"{path} does not exist; a model folder needs it.") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise ModelLoadError(f"{path} cannot be used: {exc}.") from exc

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of a text, with nothing put in front.

        With `allow_special`, markers in the text become control tokens: for trusted text only.
        """
        text = without_reserved(without_surrogates(text))
        return self.encode_masked(text) if allow_special else self._encode_plain(text)

    def encode_prompt(self, text: str, *, most_tokens: int | None = None) -> list[int]:
        """A whole raw prompt: plain text behind what the model wants in front (its BOS, if any).

        Raises TextTooLong early where it has far more than `most_tokens`.
        """
        self._check_length(text, most_tokens)
        return [*self.prefix_ids, *self.encode(text)]

    def encode_masked(
        self,
        text: str,
        unmask: Mapping[int, int] | None = None,
        *,
        most_tokens: int | None = None,
    ) -> list[int]:
        """Trusted text with untrusted parts in it, whose characters at risk are masked.

        `unmask` translates the masks back, after the markers have been found. Raises TextTooLong
        early where it has far more than `most_tokens`.
        """
        self._check_length(text, most_tokens, unmask)
        pieces: list[str] = []
        found: list[int] = []
        position = 0
        for match in self._marker_pattern.finditer(text):
            marker = self.markers[match.group()]
            before, end = text[position : match.start()], match.end()
            if marker.lstrip:
                before = before.rstrip()
            if marker.rstrip:
                end += len(text[end:]) - len(text[end:].lstrip())
            pieces += (before.translate(unmask) if unmask else before, GUARD)
            found.append(marker.token_id)
            position = end
        rest = text[position:]
        pieces.append(rest.translate(unmask) if unmask else rest)
        markers = iter(found)
        return [
            next(markers) if token_id == self._guard_id else token_id
            for token_id in self._encode_plain("".join(pieces))
        ]

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text; b"" for an id that does not exist."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._make_bytes(token_id)
        return known

    def decode(self, token_ids: Iterable[int], *, show_special: bool = False) -> str:
        """Text of the ids. A character that is not complete at the end is left out."""
        shown = b"".join(
            self.token_bytes(token_id)
            for token_id in token_ids
            if show_special or token_id not in self.hidden_ids
        )
        return codecs.getincrementaldecoder("utf-8")("replace").decode(shown)

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        # The batch form gives the GIL back while it works.
        [encoding] = self._library.encode_batch_fast([text], add_special_tokens=False)
        token_ids: list[int] = encoding.ids
        if self._marker_ids.isdisjoint(token_ids):
            return token_ids
        return self._spelled_out(token_ids)

    def _check_length(
        self, text: str, most_tokens: int | None, unmask: Mapping[int, int] | None = None
    ) -> None:
        """Encoding takes a hundred times a text's own memory, so not before it may fit.

        Where a piece is cut a word may have a token more; at twice the limit nothing is in doubt.
        """
        if most_tokens is None or len(text) <= _LIKELY_CHARS * max(most_tokens, _LEAST_PIECE):
            return
        step, num_tokens = 2 * max(most_tokens, _LEAST_PIECE), 0
        for at in range(0, len(text), step):
            num_tokens += len(self.encode(text[at : at + step].translate(unmask or {})))
            if num_tokens > 2 * max(most_tokens, _LEAST_PIECE):
                raise TextTooLong(num_tokens)

    def _spelled_out(self, token_ids: Sequence[int]) -> list[int]:
        """Some vocabularies hold control tokens as plain pieces too; write those in letters."""
        out: list[int] = []
        for token_id in token_ids:
            if token_id not in self._marker_ids:
                out.append(token_id)
                continue
            for character in self._literal[token_id]:
                [encoding] = self._library.encode_batch_fast(
                    [GUARD + character], add_special_tokens=False
                )
                out += encoding.ids[1:]
        return out

    def _find_prefix(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        plain = self._library.encode("a", add_special_tokens=False).ids
        whole = self._library.encode("a", add_special_tokens=True).ids
        at = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain and plain), 0)
        wanted = config.get("add_bos_token")
        if wanted is False:
            return ()
        bos = self.markers.get(self.named_tokens.get("bos_token", ""))
        if wanted and not at and bos:
            return (bos.token_id,)
        return tuple(whole[:at])

    def _make_bytes(self, token_id: int) -> bytes:
        if token_id in self._literal:
            return str(self._literal[token_id]).encode("utf-8", "replace")
        token = self._library.id_to_token(token_id)
        if token is None or token_id == self._guard_id:
            return b""
        if self._kind == "bytes":
            try:
                return bytes([_BYTE_OF_LETTER[letter] for letter in str(token)])
            except KeyError:
                return str(token).encode()
        if self._kind == "pieces":
            if single := _BYTE_TOKEN.fullmatch(token):
                return bytes([int(single.group(1), 16)])
            return str(token).replace("▁", " ").encode()
        return str(token).encode()


def read_template_source(model_dir: Path) -> str | None:
    """The chat template of a model folder, from its own file or from tokenizer_config.json."""
    path = model_dir / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    path = model_dir / "tokenizer_config.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _letters() -> dict[str, int]:
    """Byte-level BPE writes each byte as one letter: itself if printable, else past U+0100."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return letters | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_LETTER = _letters()


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of the texts at the leftmost place; nothing when there are none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _is_marker(token: Mapping[str, Any], template: str) -> bool:
    """Special tokens, and ordinary added ones that this model's template gives a meaning to."""
    content = str(token["content"])
    if not content.strip():
        return False
    if token.get("special") or _CONTROL_LOOK.fullmatch(content):
        return True
    return len(content) > 2 and not content.isalnum() and content in template


def _added_tokens(document: dict[str, Any], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    added = [dict(token) for token in document.get("added_tokens") or []]
    known = {token["id"] for token in added}
    for token_id, entry in (config.get("added_tokens_decoder") or {}).items():
        if int(token_id) not in known:
            added.append({"id": int(token_id), **entry})
    return sorted(added, key=lambda token: int(token["id"]))


def _load_library(
    document: dict[str, Any], added: list[dict[str, Any]], markers: set[str]
) -> tokenizers.Tokenizer:
    """The library's tokenizer, which never sees a marker in text."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    as_special = [
        {**plain, **token, "special": bool(token.get("special")) or token["content"] in markers}
        for token in added
    ]
    changed = {**document, "added_tokens": as_special, "truncation": None, "padding": None}
    try:
        library = tokenizers.Tokenizer.from_str(json.dumps(changed))
    # The library raises bare Exception for a file that it cannot read.
    except Exception as exc:
        raise ValueError(f"the tokenizer library refuses it: {exc}") from exc
    library.encode_special_tokens = True
    return library


def _decoder_kind(document: Mapping[str, Any]) -> tuple[str, bool]:
    """("bytes", "pieces" or "letters"; whether a leading space is only an artefact)."""
    parts = list(_flattened(document.get("decoder")))
    types = {part.get("type") for part in parts}
    strips = any(part.get("type") == "Strip" and part.get("start") for part in parts) or any(
        part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never"
        for part in parts
    )
    if "ByteLevel" in types:
        return "bytes", False
    if types & {"ByteFallback", "Metaspace"} or any(part.get("content") == " " for part in parts):
        return "pieces", strips
    if not types:
        return "letters", False
    raise ValueError(f"its decoder ({', '.join(map(str, types))}) is not supported")


def _flattened(decoder: Any) -> Iterable[Mapping[str, Any]]:
    if not isinstance(decoder, dict):
        return
    if decoder.get("type") == "Sequence":
        for part in decoder.get("decoders", []):
            yield from _flattened(part)
    else:
        yield decoder


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like, as text."""
    named = {}
    for key, value in config.items():
        if key.endswith("_token") and value is not None:
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                named[key] = text
    return named
