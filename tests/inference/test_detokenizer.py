"""Text comes out as whole characters, the same however it is cut, and nothing behind a stop."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.outputs import TokenLogprobs
from inference.text.detokenizer import Detokenizer
from inference.text.stop_strings import StopStrings
from tests.inference.text_models import (
    byte_level_metadata,
    make_tokenizer,
    sentencepiece_metadata,
)

TOKENIZER = make_tokenizer(byte_level_metadata())
LETTER_IDS = {
    TOKENIZER.token_bytes(n)[0]: n
    for n in range(TOKENIZER.vocab_size)
    if len(TOKENIZER.token_bytes(n)) == 1
}


def byte_ids(data: bytes) -> list[int]:
    """One token a byte: the hardest case."""
    return [LETTER_IDS[byte] for byte in data]


def run(token_ids: list[int], size: int = 1, **options: object) -> tuple[str, list[str]]:
    detokenizer = Detokenizer(TOKENIZER, **options)  # type: ignore[arg-type]
    deltas = [
        detokenizer.feed(token_ids[at : at + size]).text for at in range(0, len(token_ids), size)
    ]
    deltas.append(detokenizer.finish().text)
    return "".join(deltas), deltas


A17_TEXTS = [
    "👩‍👩‍👧‍👦 family",
    "🇩🇪 flag",
    "A 世界ab",
    "ďábel",
    "ภาษาไทย",
    "é",
]


@pytest.mark.parametrize("text", A17_TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a17_deltas_join_to_the_text_and_hold_whole_characters(text: str, size: int) -> None:
    joined, deltas = run(byte_ids(text.encode()), size)
    assert joined == text
    for delta in deltas:
        assert "\ufffd" not in delta
        delta.encode()


def test_a17_lone_continuation_byte_is_replaced_once() -> None:
    token_ids = byte_ids(b"a\x80b\xffc")
    assert run(token_ids)[0] == run(token_ids, 100)[0] == TOKENIZER.decode(token_ids) == "a�b�c"


@pytest.mark.parametrize("cut", range(1, 25))
def test_a17_a_cut_tail_is_the_same_streamed_and_not(cut: int) -> None:
    token_ids = byte_ids("x👩‍👩‍👧‍👦".encode()[:cut])
    streamed, _ = run(token_ids)
    assert streamed == run(token_ids, 1000)[0] == TOKENIZER.decode(token_ids)
    assert "\ufffd" not in streamed


def test_a17_a_stop_string_next_to_an_emoji() -> None:
    assert run(byte_ids("ok 😀STOP more".encode()), stop=["STOP"])[0] == "ok 😀"
    assert run(byte_ids("ok 😀世STOP".encode()), stop=["世"])[0] == "ok 😀"


@given(st.binary(max_size=60), st.integers(1, 7))
@settings(max_examples=200, deadline=None)
def test_a17_any_bytes_in_any_pieces_give_the_decoded_text(data: bytes, size: int) -> None:
    assert run(byte_ids(data), size)[0] == TOKENIZER.decode(byte_ids(data))


# ---- stop strings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stops", "shown", "found"),
    [
        ("alpha beta gamma delta", ["beta gamma"], "alpha ", "beta gamma"),
        ("Answer.\nUser: hi", ["\nUser:"], "Answer.", "\nUser:"),
        ("ABCDEFGHIJKL", ["DEFGHIJ"], "ABC", "DEFGHIJ"),
        ("xx stop! yy", ["stop", "stop!"], "xx ", "stop"),
        ("xx abcd", ["abcd", "cd"], "xx ", "abcd"),
        ("abcde", ["abcde", "bcd"], "a", "bcd"),
        ("aabaabaaac", ["aabaaac"], "aab", "aabaaac"),
        ("no end\nUse", ["\nUser:"], "no end\nUse", None),
        ("END", ["END"], "", "END"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a18_nothing_of_a_stop_string_is_shown(
    text: str, stops: list[str], shown: str, found: str | None, size: int
) -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=stops)
    token_ids = byte_ids(text.encode())
    deltas = [
        detokenizer.feed(token_ids[at : at + size]).text for at in range(0, len(token_ids), size)
    ]
    deltas.append(detokenizer.finish().text)
    assert "".join(deltas) == shown
    assert detokenizer.stop_found == found


def test_a18_tokens_behind_the_stop_are_not_counted() -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=["cd"])
    detokenizer.feed(byte_ids(b"abcdefgh"))
    detokenizer.feed(byte_ids(b"more"))
    assert detokenizer.num_tokens == 4
    assert detokenizer.finish().text == ""


def test_text_is_held_back_only_while_a_stop_can_still_match() -> None:
    stops = StopStrings(["\nUser:"])
    assert stops.feed("hi\nUs") == "hi"
    assert stops.feed("eful") == "\nUseful"
    assert stops.feed("\n") == ""
    assert stops.feed("\n") == "\n"
    assert stops.finish() == "\n"


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    st.lists(st.integers(0, 30), max_size=6),
)
@settings(max_examples=300, deadline=None)
def test_a18_stops_agree_with_a_plain_search(text: str, stops: list[str], cuts: list[int]) -> None:
    ends = {(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text}
    machine = StopStrings(stops)
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    shown = "".join(machine.feed(text[a:b]) for a, b in itertools.pairwise(borders))
    if ends:
        end, negative_length, stop = min(ends)
        assert (shown, machine.found) == (text[: end + negative_length], stop)
    else:
        assert (shown + machine.finish(), machine.found) == (text, None)


# ---- hidden tokens and the first space -----------------------------------------------------------


def test_a20_no_end_token_shows() -> None:
    end = TOKENIZER.markers["<|im_end|>"].token_id
    assert run([*byte_ids(b"hi"), end])[0] == "hi"
    assert run(byte_ids(b"hi!"), ending_ids=byte_ids(b"!"))[0] == "hi"


def test_nothing_ends_the_text_before_min_tokens() -> None:
    options = {"ending_ids": byte_ids(b"!"), "stop": ["b"], "min_tokens": 4}
    assert run(byte_ids(b"!bc!ab"), **options)[0] == "!bca"


def test_the_first_space_of_an_answer_can_be_dropped() -> None:
    pieces = make_tokenizer(sentencepiece_metadata())
    token_ids = pieces.encode("hello he")
    detokenizer = Detokenizer(pieces, strip_first_space=pieces.strips_first_space)
    assert detokenizer.feed(token_ids).text == "hello he"
    assert Detokenizer(pieces).feed(token_ids).text == " hello he"


# ---- log probabilities (A22) ---------------------------------------------------------------------


def with_logprobs(data: bytes, size: int, stop: list[str]) -> tuple[str, list[tuple[str, bytes]]]:
    detokenizer = Detokenizer(TOKENIZER, stop=stop)
    token_ids = byte_ids(data)
    logprobs = [TokenLogprobs(-0.1 * n, [(i, -0.1 * n)]) for n, i in enumerate(token_ids)]
    text, entries = "", []
    for at in range(0, len(token_ids), size):
        part = detokenizer.feed(token_ids[at : at + size], logprobs[at : at + size])
        text += part.text
        entries += part.logprobs
    last = detokenizer.finish()
    entries += last.logprobs
    assert len(entries) == detokenizer.num_tokens
    assert [entry.logprob for entry in entries] == [-0.1 * n for n in range(len(entries))]
    for entry, token_id in zip(entries, token_ids, strict=False):
        assert entry.top[0][1] == TOKENIZER.token_bytes(token_id)
    return text + last.text, [(entry.token, entry.token_bytes) for entry in entries]


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("plain", []),
        ("emoji 😀世 end", []),
        ("xSTOP", ["STOP"]),
        ("😀STOP and more", ["STOP"]),
        ("ab 世界", ["界"]),
        ("held \nUse", ["\nUser:"]),
    ],
)
def test_a22_bytes_join_to_the_text_however_it_is_cut(text: str, stop: list[str]) -> None:
    whole = with_logprobs(text.encode(), 1000, stop)
    for size in (1, 2, 3, 5):
        assert with_logprobs(text.encode(), size, stop) == whole
    assert b"".join(part for _, part in whole[1]).decode() == whole[0]


def test_a22_bytes_of_a_cut_character_are_left_out() -> None:
    text, entries = with_logprobs("ab😀".encode()[:4], 1, [])
    assert text == "ab"
    assert b"".join(part for _, part in entries) == b"ab"
    assert len(entries) == 4


def test_a22_a_token_that_ends_one_character_and_starts_a_stop_is_clipped() -> None:
    # One token of a multi-byte vocabulary entry: "he" completes the stop in its second letter.
    he = TOKENIZER.encode("he")
    assert len(he) == 1
    detokenizer = Detokenizer(TOKENIZER, stop=["e!"])
    first = detokenizer.feed(he, [TokenLogprobs(-1.0)])
    second = detokenizer.feed(byte_ids(b"!"), [TokenLogprobs(-2.0)])
    entries = [*first.logprobs, *second.logprobs, *detokenizer.finish().logprobs]
    assert [(entry.token, entry.token_bytes) for entry in entries] == [("he", b"h"), ("!", b"")]
