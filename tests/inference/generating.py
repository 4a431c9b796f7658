"""A generator over the real engine and a scripted model."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from inference.engine import Engine
from inference.generator import Generation, TextGenerator, TextStream
from inference.outputs import (
    SchedulerOutput,
    TextDelta,
    TextEvent,
    TokenOutput,
)
from inference.request import Request, RequestClass
from inference.sampling_params import SamplingParams
from inference.text.chat_template import ChatTemplate
from tests.inference.chat_templates import CHATML
from tests.inference.helpers import FakeRunner, fake_config
from tests.inference.text_models import (
    byte_level_metadata,
    make_tokenizer,
)

DEADLINE_S = 20.0
TOKENIZER = make_tokenizer(byte_level_metadata(), CHATML)
LETTERS = {
    TOKENIZER.token_bytes(n)[0]: n
    for n in range(TOKENIZER.vocab_size)
    if len(TOKENIZER.token_bytes(n)) == 1
}
MAX_LEN = 128


def letters(text: str | bytes) -> list[int]:
    """One token a byte."""
    return [LETTERS[byte] for byte in (text.encode() if isinstance(text, str) else text)]


class Runner(FakeRunner):
    """Gives alternatives, and takes no more steps than it is allowed once `hold` was called."""

    def __init__(self) -> None:
        super().__init__(max_model_len=MAX_LEN, num_blocks=64)
        self._steps = threading.Semaphore(0)

    def hold(self, num_steps: int) -> None:
        """From now on only this many steps, and those that `release` adds."""
        self.before_step = self._wait
        if num_steps:
            self.release(num_steps)

    def release(self, num_steps: int = 100_000) -> None:
        self._steps.release(num_steps)

    def _wait(self, output: SchedulerOutput) -> None:
        assert self._steps.acquire(timeout=DEADLINE_S), "the test never released the model"

    def _sample(self, request: Request, context: list[int]) -> TokenOutput:
        output = super()._sample(request, context)
        if output.logprobs is not None:
            num_top = request.params.logprobs or 0
            output.logprobs.top = [(output.token_id + n, -0.5 - n) for n in range(num_top)]
        return output


class Serving:
    """An engine on its own thread with a scripted model."""

    def __init__(self, **config: Any) -> None:
        self.runner = Runner()
        self.engine = Engine(fake_config(**config), self.runner)
        self.generator = TextGenerator(self.engine, TOKENIZER, ChatTemplate(CHATML, TOKENIZER))

    def start(self) -> "Serving":
        self.engine.start()
        self.engine.wait_ready(DEADLINE_S)
        return self

    def answers(self, text: str | bytes | Sequence[int], request_id: str = "r") -> None:
        ids = letters(text) if isinstance(text, str | bytes) else list(text)
        self.runner.script[request_id] = ids

    async def stream(
        self,
        prompt: Any = "hello",
        request_id: str = "r",
        request_class: RequestClass = RequestClass.API,
        **params: Any,
    ) -> TextStream:
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 100, **params})
        prepared = await self.generator.prepare(prompt, sampling)
        return self.generator.stream(
            prepared,
            sampling,
            request_id=request_id,
            owner="alice",
            cache_scope="alice",
            request_class=request_class,
        )

    def generate(self, prompt: Any = "hello", **params: Any) -> Generation:
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 100, **params})
        return self.generator.generate(prompt, sampling, request_id="r")

    def request(self, request_id: str = "r") -> Any:
        return next(
            part.request
            for output in self.runner.outputs
            for part in output.scheduled
            if part.request.request_id == request_id
        )


async def events_of(stream: TextStream) -> list[TextEvent]:
    async with asyncio.timeout(DEADLINE_S):
        return [event async for event in stream]


def text_of(events: Sequence[TextEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


async def ended(serving: Serving, stream: TextStream) -> Request:
    """Wait until the engine has ended the request and shows that nothing runs or holds a block."""
    request = stream._request
    async with asyncio.timeout(DEADLINE_S):
        while True:
            stats = serving.engine.stats()
            is_idle = not stats.num_running and not stats.num_waiting and not stats.kv.blocks_used
            if request.finish_reason is not None and is_idle:
                return request
            await asyncio.sleep(0.005)


async def read_text(stream: TextStream, num_chars: int) -> None:
    got = ""
    async with asyncio.timeout(DEADLINE_S):
        while len(got) < num_chars:
            event = await anext(stream)
            if isinstance(event, TextDelta):
                got += event.text
