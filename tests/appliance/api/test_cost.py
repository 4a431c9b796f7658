"""What one token costs the event loop between the engine and the socket, counted, not timed."""

import asyncio
from typing import Any

import pytest

from appliance.api.dialect import ChatFrames
from appliance.api.reply import Reply
from appliance.api.sse import event_stream
from appliance.serving.engine_stream import EngineStream
from appliance.serving.engine_words import generation_event
from appliance.serving.news import News
from inference.request import FinishReason, Request
from inference.sampling_params import SamplingParams
from inference.streams import RequestStream, deliver_batch
from inference.text.detokenizer import Detokenizer
from inference.text_stream import TextStream
from tests.inference.text_models import byte_level_metadata, make_tokenizer

NUM_TOKENS = 50
TOKENIZER = make_tokenizer(byte_level_metadata(), "{{ messages }}")
[LETTER] = TOKENIZER.encode("a", allow_special=False)


class Engine:
    """Aborts by saying so; tokens are added by the test."""

    def __init__(self) -> None:
        self.streams: dict[str, RequestStream] = {}

    def abort(self, request_id: str, *_: Any) -> bool:
        self.streams[request_id].end(FinishReason.ABORT, None)
        return True


class Answer:
    """What `Reply` needs of a `Generation`, from the engine's stream up, without the ledger."""

    def __init__(self, number: int, engine: Engine) -> None:
        self.request_id, self.prompt_tokens = f"r-{number}", 2
        self.source = engine.streams[self.request_id] = RequestStream(self.request_id, list)
        request = Request(
            request_id=self.request_id,
            prompt_token_ids=[1, 2],
            params=SamplingParams(max_tokens=100),
            owner="a",
            cache_scope="a",
        )
        text = TextStream(engine, request, self.source, Detokenizer(TOKENIZER))  # type: ignore[arg-type]
        self.stream = EngineStream(text, lambda: engine.abort(self.request_id), generation_event)
        self.num_looks = 0

    def take(self) -> Any:
        self.num_looks += 1
        return self.stream.take()

    def listen(self, news: News) -> None:
        self.stream.listen(news.ring)

    def close_soon(self) -> None:
        """The test ends every answer."""

    async def aclose(self) -> None:
        await self.stream.aclose()


class Reading:
    """A task that reads a stream of `num_choices`, and every callback that anybody schedules."""

    def __init__(self, num_choices: int, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = Engine()
        self.answers: list[Any] = [Answer(number, engine) for number in range(num_choices)]
        self.sources = list(engine.streams.values())
        self.reply = Reply(self.answers, num_choices, None)
        self.writes: list[bytes] = []
        self.num_scheduled = 0
        loop = asyncio.get_running_loop()
        call_soon = loop.call_soon

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.num_scheduled += 1
            return call_soon(*args, **kwargs)

        monkeypatch.setattr(loop, "call_soon", counting)
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for data in event_stream(self.reply, ChatFrames("m")):
            self.writes.append(data)

    async def settle(self) -> None:
        """Let everything happen that was set going."""
        for _ in range(5):
            await asyncio.sleep(0)
            self.num_scheduled -= 1  # this task's own

    def step(self) -> None:
        """One step of the engine: a token for each choice, one delivery."""
        for source in self.sources:
            source.add_token(LETTER, None)
        deliver_batch(self.sources)

    async def end(self) -> None:
        for source in self.sources:
            source.add_token(LETTER, None)
            source.end(FinishReason.LENGTH, None)
        deliver_batch(self.sources)
        await asyncio.wait_for(self.task, 20)


@pytest.mark.parametrize("num_choices", [1, 4])
async def test_a_step_wakes_a_streams_one_task_once_and_writes_once(
    num_choices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = Reading(num_choices, monkeypatch)
    await reading.settle()
    assert len(reading.writes) == 1  # the roles
    before, looks = reading.num_scheduled, reading.answers[0].num_looks
    for _ in range(NUM_TOKENS):
        reading.step()
        await reading.settle()
    assert reading.num_scheduled - before == NUM_TOKENS
    assert reading.answers[0].num_looks - looks == NUM_TOKENS
    assert len(reading.writes) == 1 + NUM_TOKENS
    assert all(write.count(b"data: ") == num_choices for write in reading.writes)
    await reading.end()


async def test_tokens_that_came_while_the_loop_was_busy_go_out_in_one_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading = Reading(1, monkeypatch)
    await reading.settle()
    for _ in range(NUM_TOKENS):
        reading.step()
    await reading.settle()
    assert len(reading.writes) == 2
    assert b'"content":"%s"' % (b"a" * NUM_TOKENS) in reading.writes[1]
    await reading.end()


async def test_the_last_text_the_reason_and_the_end_go_out_in_one_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading = Reading(1, monkeypatch)
    await reading.settle()
    await reading.end()
    assert len(reading.writes) == 2
    text, reason, done = reading.writes[1].strip().split(b"\n\n")
    assert b'"content":"a"' in text
    assert b'"finish_reason":"length"' in reason
    assert done == b"data: [DONE]"


async def test_a_stream_sets_one_timer_however_many_tokens_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    set_at: list[float] = []
    call_at = loop.call_at

    def counting(when: float, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        set_at.append(when)
        return call_at(when, *args, **kwargs)

    monkeypatch.setattr(loop, "call_at", counting)
    reading = Reading(2, monkeypatch)
    await reading.settle()
    for _ in range(NUM_TOKENS):
        reading.step()
        await reading.settle()
    assert len(set_at) == 1
    await reading.end()


# ---- the bell


async def test_a_ring_before_the_wait_is_not_lost() -> None:
    news = News()
    news.ring()
    await asyncio.wait_for(news.wait(), 20)
    waiting = asyncio.ensure_future(news.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    news.ring()
    news.ring()
    await asyncio.wait_for(waiting, 20)


async def test_a_wait_ends_when_its_time_is_up_also_after_a_longer_one() -> None:
    news = News()
    longer = asyncio.ensure_future(news.wait(600.0))
    await asyncio.sleep(0)
    news.ring()
    await longer
    await asyncio.wait_for(news.wait(0.001), 20)
    news.close()
