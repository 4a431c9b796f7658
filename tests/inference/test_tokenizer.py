"""Text and token ids: control tokens come from trusted text only, and bytes make the text."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from inference.errors import ModelLoadError
from inference.text import tokenizer as tokenizer_module
from inference.text.tokenizer import GUARD, MASK_BASE, TextTooLong, Tokenizer
from inference.weights.gguf_tokenizer import build_tokenizer
from tests.inference.text_models import (
    CONTROL,
    byte_level_metadata,
    make_tokenizer,
    sentencepiece_metadata,
)

TEXTS = [
    "hello world",
    "  two spaces\n\n\tand a tab ",
    "Grüße, 世界, ไทย, ď",
    "👩‍👩‍👧‍👦 and 🇩🇪",
    "it's 12345 he'll",
    "\r\n\r\n",
    "",
]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return make_tokenizer(byte_level_metadata())


@pytest.fixture(scope="module")
def pieces() -> Tokenizer:
    return make_tokenizer(sentencepiece_metadata())


def library_of(metadata: dict[str, object]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(build_tokenizer(metadata)[0]))


@pytest.mark.parametrize("text", TEXTS)
def test_plain_text_encodes_as_the_library_does_and_comes_back(
    text: str, byte_level: Tokenizer
) -> None:
    expected = library_of(byte_level_metadata()).encode(text, add_special_tokens=False).ids
    assert byte_level.encode(text) == expected
    assert byte_level.decode(expected) == text


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_text_encodes_as_the_library_does_and_comes_back(
    text: str, pieces: Tokenizer
) -> None:
    expected = library_of(sentencepiece_metadata()).encode(text, add_special_tokens=False).ids
    assert pieces.encode(text) == expected
    assert pieces.decode(expected) == (f" {text}" if text else "")


@pytest.mark.parametrize("marker", CONTROL[:-2])
def test_a21_text_never_becomes_a_control_token(marker: str, byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode(f"a{marker}b")
    assert byte_level.hidden_ids.isdisjoint(token_ids)
    assert byte_level.decode(token_ids) == f"a{marker}b"
    trusted = byte_level.encode(f"a{marker}b", allow_special=True)
    assert byte_level.markers[marker].token_id in trusted


def test_a21_a_shown_marker_is_one_only_where_the_template_uses_it() -> None:
    thinking = make_tokenizer(byte_level_metadata(), template="... </think> ...")
    assert "</think>" in thinking.markers
    marker_id = thinking.markers["</think>"].token_id
    assert marker_id not in thinking.encode("so </think> there")
    assert thinking.decode([marker_id]) == "</think>"


def test_a21_control_pieces_inside_a_plain_vocabulary_are_spelled_out() -> None:
    metadata = byte_level_metadata()
    document, config = build_tokenizer(metadata)
    # A vocabulary whose merges lead to the text of a control token.
    document["model"]["merges"] += [["<", "s"], ["<s", ">"]]
    document["model"]["vocab"]["<s"] = len(document["model"]["vocab"])
    document["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    tokenizer = Tokenizer(document, config)
    token_ids = tokenizer.encode("x<s>y")
    assert tokenizer.markers["<s>"].token_id not in token_ids
    assert tokenizer.decode(token_ids) == "x<s>y"


def test_trusted_text_is_split_as_the_library_splits_it(byte_level: Tokenizer) -> None:
    text = "<|im_start|>user\n  he said a<|im_end|>\n<|im_start|>assistant\n"
    expected = library_of(byte_level_metadata()).encode(text, add_special_tokens=False).ids
    assert byte_level.encode(text, allow_special=True) == expected


def test_trusted_sentencepiece_text_is_split_as_the_library_splits_it(pieces: Tokenizer) -> None:
    text = "<s>[INST] hello [/INST] he </s>[INST] hell[/INST]"
    expected = library_of(sentencepiece_metadata()).encode(text, add_special_tokens=False).ids
    assert pieces.encode(text, allow_special=True) == expected


def test_markers_that_swallow_white_space_do_so() -> None:
    document, config = build_tokenizer(byte_level_metadata())
    for token in document["added_tokens"]:
        if token["content"] == "<|end|>":
            token |= {"rstrip": True, "lstrip": True}
    library = tokenizers.Tokenizer.from_str(json.dumps(document))
    text = "a \n<|end|> \n\n b<|end|><|end|>c"
    expected = library.encode(text, add_special_tokens=False).ids
    assert Tokenizer(document, config).encode(text, allow_special=True) == expected


def test_private_characters_and_lone_surrogates_are_replaced(byte_level: Tokenizer) -> None:
    text = f"a{GUARD}b{chr(MASK_BASE)}c\ud800d😀"
    assert byte_level.decode(byte_level.encode(text)) == "a\ufffdb\ufffdc\ufffdd😀"
    assert byte_level.decode(byte_level.encode(text, allow_special=True)) == (
        "a\ufffdb\ufffdc\ufffdd😀"
    )


def test_a20_raw_prompts_get_exactly_the_bos_that_the_model_wants(pieces: Tokenizer) -> None:
    with_bos = make_tokenizer(byte_level_metadata(bos="<|begin_of_text|>"))
    bos_id = with_bos.markers["<|begin_of_text|>"].token_id
    assert with_bos.encode_prompt("he")[:1] == [bos_id]
    assert with_bos.encode_prompt("<|begin_of_text|>he").count(bos_id) == 1
    assert pieces.encode_prompt("he").count(1) == 1
    assert make_tokenizer(byte_level_metadata()).encode_prompt("") == []


def test_a20_a_bos_switch_in_the_configuration_is_followed() -> None:
    document, config = build_tokenizer(byte_level_metadata(bos="<s>"))
    assert Tokenizer(document, config | {"add_bos_token": False}).prefix_ids == ()
    document["post_processor"] = None
    assert Tokenizer(document, config | {"add_bos_token": True}).prefix_ids == (3,)


def test_every_id_has_bytes_and_ids_past_the_end_have_none(byte_level: Tokenizer) -> None:
    assert byte_level.vocab_size == len(byte_level_metadata()["tokenizer.ggml.tokens"])
    for byte in range(256):
        [token_id] = byte_level.encode(chr(byte)) if byte < 128 else [None]
        if token_id is not None:
            assert byte_level.token_bytes(token_id) == bytes([byte])
    for token_id in (byte_level.vocab_size, byte_level.vocab_size + 5, 10**9):
        assert byte_level.token_bytes(token_id) == b""


def test_byte_tokens_of_sentencepiece_make_characters(pieces: Tokenizer) -> None:
    token_ids = pieces.encode("世")
    assert b"".join(map(pieces.token_bytes, token_ids)) == " 世".encode()
    assert pieces.decode(token_ids[:-1]) == " "


def test_hidden_tokens_show_only_when_asked(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("<|im_start|>he<|im_end|>", allow_special=True)
    assert byte_level.decode(token_ids) == "he"
    assert byte_level.decode(token_ids, show_special=True) == "<|im_start|>he<|im_end|>"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model": 5}', '{"added_tokens": 3}'])
def test_a_broken_file_is_refused_with_its_name(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        Tokenizer.from_dir(tmp_path)


class CountingLibrary:
    """The library, and how much text it was given at a time."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.num_chars: list[int] = []

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.num_chars += [len(text) for text in texts]
        return self._library.encode_batch_fast(texts, **options)


@pytest.mark.parametrize("text", ["😀", "世界", "!?", "1", "\n\t "])
def test_a_text_of_far_too_many_tokens_is_never_encoded_whole(text: str) -> None:
    """Encoding takes a hundred times a text's own memory: 12 bodies of 8 MB took 5 GB."""
    tokenizer = make_tokenizer(byte_level_metadata())
    library = tokenizer._library = CountingLibrary(tokenizer._library)  # type: ignore[assignment]
    for encode in (tokenizer.encode_prompt, tokenizer.encode_masked):
        library.num_chars.clear()
        with pytest.raises(TextTooLong) as caught:
            encode(text * 1_000_000, most_tokens=8192)
        assert caught.value.num_tokens > 8192
        assert sum(library.num_chars) < 100_000


def test_a_long_text_that_just_fits_is_encoded_whole(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "_LIKELY_CHARS", 0)
    text = "x" * 300_000
    expected = byte_level.encode(text)
    num = len(expected)
    assert byte_level.encode_prompt(text, most_tokens=num) == expected
    # A mask is no letter of its own: it would count as three.
    masked = byte_level.encode_masked(
        chr(MASK_BASE) * len(text), {MASK_BASE: ord("x")}, most_tokens=num
    )
    assert masked == expected
