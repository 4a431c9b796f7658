"""The bundled model on the fastest path of this machine, through the whole engine."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference.config import EngineConfig
from inference.engine import Engine
from inference.generator import TextGenerator
from inference.runner.model_runner import ModelRunner
from inference.sampling_params import SamplingParams
from inference.text.chat_template import ChatTemplate
from inference.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def generator(bundled_model_dir: Path) -> Iterator[TextGenerator]:
    config = EngineConfig(model_dir=bundled_model_dir, num_blocks=256)
    engine = Engine(config, ModelRunner(config))
    engine.start()
    engine.wait_ready(600)
    tokenizer = Tokenizer.from_dir(bundled_model_dir)
    yield TextGenerator(engine, tokenizer, ChatTemplate.from_dir(bundled_model_dir, tokenizer))
    engine.shutdown(0)


async def test_the_same_question_gets_the_same_answer_from_the_cache(
    generator: TextGenerator,
) -> None:
    """Two first words are nearly equal here, so a rest of the prompt that rounded otherwise than
    the whole prompt did would change the answer."""
    params = SamplingParams(temperature=0.0, max_tokens=16)
    answers = []
    for number in range(3):
        prepared = await generator.prepare(
            [{"role": "user", "content": "What is the capital of France?"}], params
        )
        stream = generator.stream(
            prepared, params, request_id=f"q{number}", owner="a", cache_scope="a"
        )
        text = "".join([event.text async for event in stream if hasattr(event, "text")])
        answers.append((text, stream.num_cached_tokens))
    assert [text for text, _ in answers] == ["The capital of France is Paris."] * 3
    assert [cached for _, cached in answers] == [0, 32, 32]


async def test_lookahead_changes_no_answer(generator: TextGenerator) -> None:
    """A few guesses are few rows, and those are multiplied the same way as one."""
    engine = generator._engine
    assert isinstance(engine, Engine)
    asked = [{"role": "user", "content": "Repeat: The quick brown fox. The quick brown fox."}]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    answers = {}
    for speculation in ("off", "on"):
        engine.tune(speculation=speculation)
        answers[speculation] = (await generator.collect(asked, params, request_id=speculation)).text
    engine.tune(speculation="auto")
    assert answers["on"] == answers["off"]
    # The figures are published a moment after the answer.
    async with asyncio.timeout(60):
        while engine.stats().totals["draft_tokens_accepted"] == 0:
            await asyncio.sleep(0.01)
