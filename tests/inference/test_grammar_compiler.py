"""Constraints are compiled beside the engine, within bounds."""

import asyncio
import json
import threading

import numpy as np
import pytest

from inference.engine import Engine
from inference.errors import InvalidConstraint, QueueFull
from inference.generator import TextGenerator
from inference.grammar import compiler as compiler_module
from inference.grammar.compiler import GrammarCompiler
from inference.grammar.constraint import Constraint
from inference.grammar.matcher import MatcherFailed
from inference.outputs import GenerationFinished, TextDelta
from inference.request import FinishReason
from inference.sampling_params import SamplingParams
from inference.text.chat_template import ChatTemplate
from tests.inference.helpers import fake_config
from tests.inference.structured import (
    EOS,
    PERSON,
    TOKENIZER,
    VOCAB_SIZE,
    ScoringRunner,
    fits,
    schema,
    token_of,
)


def fresh_compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))


async def test_equal_constraints_are_tried_once_and_few_are_remembered(monkeypatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(compiler_module, "_MAX_KNOWN", 3)
    monkeypatch.setattr(compiler_module, "try_out", lambda new_matcher: tried.append(1))
    compiler = fresh_compiler()
    await compiler.compile(schema(PERSON))
    await compiler.compile(schema(PERSON))
    assert len(tried) == 1
    for n in range(3):
        await compiler.compile(Constraint("regex", f"a{n}"))
    assert len(compiler._known) == 3
    await compiler.compile(schema(PERSON))
    assert len(tried) == 5


def follow(compiler: GrammarCompiler, constraint: Constraint, text: str) -> list[bytes]:
    """The masks along an answer; raises MatcherFailed where it costs too much."""
    matcher = compiler.compile_now(constraint).new_matcher()
    masks, taken = [], []
    for letter in text:
        mask = np.zeros(matcher.num_words, np.int32)
        matcher.fill(taken, mask)
        masks.append(mask.tobytes())
        taken.append(token_of(letter))
        matcher.accept(taken[-1])
    return masks


def test_an_answer_that_costs_too_much_is_no_neighbours_fault_a23() -> None:
    """The library's lexers are shared by copies, grow with each, and never recover."""
    compiler = fresh_compiler()
    constraint = Constraint("regex", "[ab]{50}(c|(a{1,500}){1,500})")
    before = follow(compiler, constraint, "ab" * 25 + "c")
    running = compiler.compile_now(constraint).new_matcher()
    with pytest.raises(MatcherFailed, match="too many ways"):
        follow(compiler, constraint, "a" * 500)
    assert follow(compiler, constraint, "ab" * 25 + "c") == before
    running.fill([token_of("a")] * 9, np.zeros(running.num_words, np.int32))


async def test_many_schemas_at_once_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(compiler_module, "_MAX_PENDING", 2)
    compiler = fresh_compiler()
    attempts = [compiler.compile(Constraint("regex", f"a{n}")) for n in range(5)]
    results = await asyncio.gather(*attempts, return_exceptions=True)
    assert sum(isinstance(result, QueueFull) for result in results) == 3
    await compiler.compile(Constraint("regex", "later"))


async def test_a_caller_does_not_wait_for_ever(monkeypatch) -> None:
    monkeypatch.setattr(compiler_module, "_MAX_WAIT_S", 0.01)
    compiler, may_end = fresh_compiler(), threading.Event()
    monkeypatch.setattr(compiler, "compile_now", lambda constraint: may_end.wait(20))
    try:
        with pytest.raises(InvalidConstraint, match="too long"):
            await compiler.compile(schema(PERSON))
    finally:
        may_end.set()


async def test_the_generator_refuses_before_anything_is_queued_and_serves_what_is_right() -> None:
    runner = ScoringRunner()
    engine = Engine(fake_config(), runner)
    engine.start()
    try:
        engine.wait_ready(20)
        generator = TextGenerator(engine, TOKENIZER, ChatTemplate(None, TOKENIZER))
        bad = SamplingParams(constraint=schema({"type": "yaml"}))
        with pytest.raises(InvalidConstraint):
            await generator.prepare("hello", bad)
        assert not runner.outputs
        params = SamplingParams(max_tokens=400, seed=3, constraint=schema(PERSON))
        prepared = await generator.prepare("hello", params)
        async with generator.stream(
            prepared, params, request_id="r", owner="a", cache_scope="a"
        ) as stream:
            events = [event async for event in stream]
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        assert fits(json.loads(text), PERSON)
        assert isinstance(events[-1], GenerationFinished)
        assert events[-1].finish_reason is FinishReason.STOP
    finally:
        engine.shutdown(0.0)
