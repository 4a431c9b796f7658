"""The generator over the real engine and a scripted model: text, ends, log probabilities."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from inference.config import EngineConfig
from inference.engine import Engine
from inference.generator import TextGenerator
from inference.outputs import (
    GenerationFinished,
    PromptProgress,
    QueueUpdate,
)
from inference.request import FinishReason, RequestClass
from inference.sampling_params import SamplingParams
from inference.text.chat_template import ChatTemplate
from inference.text.tokenizer import Tokenizer
from tests.inference.chat_templates import STRICT
from tests.inference.generating import (
    DEADLINE_S,
    Serving,
    ended,
    events_of,
    letters,
    read_text,
    text_of,
)
from tests.inference.helpers import EOS
from tests.inference.text_models import (
    make_tokenizer,
    sentencepiece_metadata,
)


async def test_a_conversation_becomes_text_and_ends_once(serving: Serving) -> None:
    serving.answers([*letters("Grüße 👋"), EOS])
    events = await events_of(await serving.stream([{"role": "user", "content": "hi"}]))
    assert text_of(events) == "Grüße 👋"
    last = events[-1]
    assert isinstance(last, GenerationFinished)
    assert [type(event) for event in events].count(GenerationFinished) == 1
    assert last.finish_reason is FinishReason.STOP
    assert last.num_completion_tokens == len(letters("Grüße 👋")) + 1
    assert last.num_prompt_tokens == len(serving.request().prompt_token_ids)
    assert last.ttft_s is not None
    assert 0 <= last.queue_s <= last.ttft_s <= last.duration_s


async def test_progress_and_counts_are_told(serving: Serving) -> None:
    serving.answers([*letters("ok"), EOS])
    stream = await serving.stream("word " * 20)
    events = await events_of(stream)
    progress = [event for event in events if isinstance(event, PromptProgress)]
    assert all(p.num_computed_tokens <= p.num_prompt_tokens for p in progress)
    assert events[-1].num_prompt_tokens == stream.num_prompt_tokens == 100
    serving.answers([*letters("ok"), EOS], "again")
    again = await serving.stream("word " * 20, "again")
    last = (await events_of(again))[-1]
    assert last.num_cached_tokens == again.num_cached_tokens == 96


async def test_what_the_server_decides_reaches_the_engine(serving: Serving) -> None:
    params = SamplingParams(max_tokens=2)
    prepared = await serving.generator.prepare(
        [{"role": "user", "content": "hi"}], params, server_prompt="Be kind."
    )
    assert 5 < prepared.num_public_prefix_tokens < prepared.num_prompt_tokens
    assert prepared.max_new_tokens == 2
    stream = serving.generator.stream(
        prepared,
        params,
        request_id="r",
        owner="user:1",
        cache_scope="team:2",
        request_class=RequestClass.INTERACTIVE,
        labels={"who": "alice"},
    )
    await events_of(stream)
    request = serving.request()
    assert (request.owner, request.cache_scope) == ("user:1", "team:2")
    assert request.request_class is RequestClass.INTERACTIVE
    assert request.labels == {"who": "alice"}
    assert request.num_public_prefix_tokens == prepared.num_public_prefix_tokens


async def test_a_request_that_waits_is_told_its_place() -> None:
    serving = Serving(max_num_seqs=1).start()
    serving.runner.hold(0)
    try:
        serving.answers([*letters("one"), EOS], "first")
        serving.answers([*letters("two"), EOS], "second")
        first = await serving.stream(request_id="first")
        second = await serving.stream(request_id="second")
        serving.runner.release(2)
        async with asyncio.timeout(DEADLINE_S):
            place = await anext(second)
        assert isinstance(place, QueueUpdate)
        assert place.ahead == 0
        serving.runner.release()
        both = await asyncio.gather(events_of(first), events_of(second))
        assert [text_of(events) for events in both] == ["one", "two"]
    finally:
        serving.engine.shutdown(0.0)


# ---- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [2, 0, 8])
def test_a20_any_of_several_end_ids_stops_and_none_is_shown(end: int) -> None:
    serving = Serving()
    serving.runner.info = replace(serving.runner.info, eos_token_ids=(2, 0, 8))
    serving.start()
    try:
        serving.answers([*letters("done"), end, *letters("user turn")])
        done = serving.generate([{"role": "user", "content": "hi"}])
        assert done.text == "done"
        assert done.finished.finish_reason is FinishReason.STOP
        assert done.finished.num_completion_tokens == 5
    finally:
        serving.engine.shutdown(0.0)


def test_a_stop_id_ends_the_text_and_ignore_eos_goes_on(serving: Serving) -> None:
    serving.answers(letters("one!two"))
    done = serving.generate(stop_token_ids=tuple(letters("!")))
    assert (done.text, done.finished.detail) == ("one", str(letters("!")[0]))
    serving.answers([*letters("a"), EOS, *letters("b"), EOS])
    done = serving.generate(ignore_eos=True, max_tokens=3)
    assert (done.text, done.finished.finish_reason) == ("ab", FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("stop", "shown", "counted"),
    [
        (("beta gamma",), "alpha ", len("alpha beta gamma")),
        (("gam", "gamma"), "alpha beta ", len("alpha beta gam")),
        (("a delta",), "alpha beta gamm", len("alpha beta gamma delta")),
    ],
)
async def test_a18_a_stop_string_ends_the_generation_itself(
    serving: Serving, stop: tuple[str, ...], shown: str, counted: int
) -> None:
    serving.answers(letters("alpha beta gamma delta and so on for a long time"))
    serving.runner.hold(counted + 1)
    stream = await serving.stream(stop=stop)
    events = await events_of(stream)
    serving.runner.release()
    last = events[-1]
    assert text_of(events) == shown
    assert isinstance(last, GenerationFinished)
    assert (last.finish_reason, last.detail) == (FinishReason.STOP, stop[0])
    assert last.num_completion_tokens == counted
    request = await ended(serving, stream)
    assert (request.finish_reason, request.finish_detail) == (FinishReason.STOP, stop[0])
    assert counted <= len(request.output_token_ids) <= counted + 2


def test_a17_an_emoji_cut_by_max_tokens_shows_nothing_of_it(serving: Serving) -> None:
    serving.answers(letters("ab👋cd"))
    done = serving.generate(max_tokens=4)
    assert done.text == "ab"
    assert done.finished.finish_reason is FinishReason.LENGTH
    assert done.finished.num_completion_tokens == 4


def test_the_space_that_sentencepiece_puts_first_is_dropped_in_chats_only() -> None:
    pieces = make_tokenizer(sentencepiece_metadata())
    serving = Serving()
    serving.generator = TextGenerator(serving.engine, pieces, ChatTemplate(STRICT, pieces))
    serving.start()
    try:
        serving.answers([*pieces.encode("hello he"), EOS])
        assert serving.generate([{"role": "user", "content": "hi"}]).text == "hello he"
        assert serving.generate("hi").text == " hello he"
    finally:
        serving.engine.shutdown(0.0)


def test_a_failed_row_ends_only_its_request_with_the_reason(serving: Serving) -> None:
    serving.runner.row_errors["r"] = "the numbers are not finite"
    done = serving.generate()
    assert done.finished.finish_reason is FinishReason.ERROR
    assert "not finite" in str(done.finished.detail)
    serving.answers([*letters("fine"), EOS])
    assert serving.generate().text == "fine"


async def test_an_engine_that_stops_ends_every_stream_once() -> None:
    serving = Serving().start()
    serving.runner.hold(3)
    stream = await serving.stream()
    await read_text(stream, 1)
    stopping = asyncio.get_running_loop().run_in_executor(None, serving.engine.shutdown, 0.0)
    async with asyncio.timeout(DEADLINE_S):
        # It may have left already, if a step that was allowed had not begun.
        while serving.engine.stats().state not in ("draining", "dead"):
            await asyncio.sleep(0.001)
    serving.runner.release()
    events = await events_of(stream)
    await stopping
    assert [type(event) for event in events].count(GenerationFinished) == 1
    assert events[-1].finish_reason is FinishReason.ERROR
    assert events[-1].detail


# ---- log probabilities ---------------------------------------------------------------------------


@pytest.mark.parametrize("top", [0, 5])
@pytest.mark.parametrize("stop", [(), ("wo",), ("👋",)])
def test_a22_one_entry_a_token_and_bytes_that_join_to_the_text(
    serving: Serving, top: int, stop: tuple[str, ...]
) -> None:
    serving.answers([*letters("hi wörld wow 👋!"), EOS])
    done = serving.generate(logprobs=top, stop=stop)
    assert len(done.logprobs) == done.finished.num_completion_tokens
    assert b"".join(entry.token_bytes for entry in done.logprobs).decode() == done.text
    for entry in done.logprobs:
        assert len(entry.top) == top
        assert all(token == entry.token for token, _, _ in entry.top[:1])


def test_a22_without_asking_there_are_none(serving: Serving) -> None:
    serving.answers([*letters("hi"), EOS])
    assert serving.generate().logprobs == []


# ---- the real model ------------------------------------------------------------------------------


@pytest.mark.model
def test_the_bundled_model_knows_the_capital_of_france(bundled_model_dir: Path) -> None:
    from inference.runner.model_runner import ModelRunner

    # The first word is nearly a tie, so this asks the exact arithmetic.
    config = EngineConfig(
        model_dir=bundled_model_dir,
        dtype="float32",
        cpu_backend="torch",
        num_blocks=64,
        num_threads=1,
    )
    engine = Engine(config, ModelRunner(config))
    engine.start()
    try:
        engine.wait_ready(120)
        tokenizer = Tokenizer.from_dir(bundled_model_dir)
        template = ChatTemplate.from_dir(bundled_model_dir, tokenizer)
        done = TextGenerator(engine, tokenizer, template).generate(
            [{"role": "user", "content": "What is the capital of France?"}],
            SamplingParams(temperature=0.0, max_tokens=12),
        )
    finally:
        engine.shutdown(0.0)
    assert "Paris" in done.text
    assert done.finished.finish_reason is FinishReason.STOP
    assert "<|im_end|>" not in done.text


@pytest.mark.model
def test_the_bundled_models_ids_are_those_of_transformers(bundled_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(bundled_model_dir)
    ours = Tokenizer.from_dir(bundled_model_dir)
    template = ChatTemplate.from_dir(bundled_model_dir, ours)
    for text in (
        "It's 12,345 — déjà vu",
        "  a\n\n\tb  ",
        "世界 👩‍👩‍👧‍👦",
        "def f(x):\n    return x",
    ):
        token_ids = theirs(text).input_ids
        assert ours.encode_prompt(text) == token_ids
        assert ours.decode(token_ids) == theirs.decode(token_ids) == text
        messages = [{"role": "user", "content": text}]
        expected = theirs.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert template.encode(messages).token_ids == expected
