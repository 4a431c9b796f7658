"""Requests, schedulers and a runner without a model, for tests of the planning half."""

import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from inference.config import EngineConfig
from inference.errors import NotEnoughMemory
from inference.kv_cache.manager import KVCacheManager
from inference.kv_cache.resizing import PoolMemory
from inference.outputs import RunnerInfo, SchedulerOutput, StepOutput, TokenLogprobs, TokenOutput
from inference.request import Request, RequestClass
from inference.sampling_params import SamplingParams
from inference.scheduler import Scheduler
from inference.scheduling.settings import SchedulerSettings
from inference.scheduling.speculation import accept_draft

EOS = 2
VOCAB_SIZE = 1000
# Ids from here on are what the fake model says when no script tells it otherwise.
FIRST_WORD = 10

_ids = count(1)


def make_request(
    prompt: int | Sequence[int] = 8,
    max_tokens: int | None = 8,
    *,
    request_id: str | None = None,
    owner: str = "alice",
    cache_scope: str | None = None,
    request_class: RequestClass = RequestClass.API,
    public: int = 0,
    fork_of: str | None = None,
    arrival_s: float = 0.0,
    queue_deadline_s: float | None = None,
    **params: object,
) -> Request:
    """`prompt` is the ids, or how many (then no two requests share a beginning)."""
    number = next(_ids)
    if isinstance(prompt, int):
        prompt = [FIRST_WORD + (number * 7919 + 31 * i) % (VOCAB_SIZE - 20) for i in range(prompt)]
    return Request(
        request_id=request_id or f"r{number}",
        prompt_token_ids=list(prompt),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0, **params),  # type: ignore[arg-type]
        owner=owner,
        cache_scope=owner if cache_scope is None else cache_scope,
        request_class=request_class,
        num_public_prefix_tokens=public,
        fork_of=fork_of,
        arrival_s=arrival_s,
        queue_deadline_s=queue_deadline_s,
    )


def fake_next_token(context: Sequence[int]) -> int:
    """What the fake model says after `context`: it depends on every id and every position."""
    return FIRST_WORD + zlib.crc32(array("q", context).tobytes()) % (VOCAB_SIZE - FIRST_WORD)


def expected_output(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The fake model's answer to a prompt that nothing disturbs."""
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(fake_next_token(context))
    return context[len(prompt) :]


class FakeRunner:
    """Keeps token ids where a model keeps keys and values, and reads them through block tables.

    So a stale block, a wrong table or a lost copy changes its answers, as it would a model's.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        max_model_len: int = 4096,
        budget: int = 512,
        script: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.info = RunnerInfo(
            model_name="fake",
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            eos_token_ids=(EOS,),
            num_blocks=num_blocks,
            block_size=block_size,
            bytes_per_block=1024,
            # The pool has half of it at first.
            kv_budget_bytes=2 * num_blocks * 1024,
            default_max_num_batched_tokens=budget,
            device="cpu",
            dtype="float32",
            backend="fake",
        )
        # Request id -> the ids it is answered with; then the fake model goes on.
        self.script = dict(script or {})
        self.memory: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.outputs: list[SchedulerOutput] = []
        self.num_prompt_tokens: dict[str, int] = {}
        # Called before each step; may raise, or wait for the test.
        self.before_step: Callable[[SchedulerOutput], None] = lambda output: None
        # Request id -> the error its next token has.
        self.row_errors: dict[str, str] = {}
        # The same, for which the caller is at fault.
        self.row_refusals: dict[str, str] = {}
        self.load_error: Exception | None = None
        # What the KV storage can be made as large as.
        self.most_blocks = 2 * num_blocks
        self.is_closed = False

    def load(self, on_progress: Callable[[float, str], None]) -> RunnerInfo:
        if self.load_error is not None:
            raise self.load_error
        on_progress(0.5, "reading weights")
        return self.info

    def close(self) -> None:
        self.is_closed = True

    def move_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        assert not {a for a, _ in pairs} & {b for _, b in pairs}, "a chain of moves"
        for source, destination in pairs:
            self.memory[destination] = list(self.memory[source])

    def resize_kv(self, num_blocks: int) -> None:
        if num_blocks > self.most_blocks:
            raise NotEnoughMemory(f"the machine's memory holds {self.most_blocks} blocks")
        kept = self.memory[:num_blocks]
        size = self.info.block_size
        self.memory = kept + [[None] * size for _ in range(num_blocks - len(kept))]

    def execute(self, scheduler_output: SchedulerOutput) -> StepOutput:
        self.before_step(scheduler_output)
        self.outputs.append(scheduler_output)
        for source, destination in scheduler_output.block_copies:
            self.memory[destination] = list(self.memory[source])
        written: set[tuple[int, int]] = set()
        for part in scheduler_output.scheduled:
            request, size = part.request, self.info.block_size
            assert part.start == request.num_computed_tokens
            end = part.start + part.num_new_tokens
            for position, token_id in zip(range(part.start, end), part.token_ids(), strict=True):
                slot = (part.block_table[position // size], position % size)
                assert slot not in written, f"slot {slot} has two writers"
                written.add(slot)
                self.memory[slot[0]][slot[1]] = token_id
            num_prompt = max(0, min(end, request.num_prompt_tokens) - part.start)
            seen = self.num_prompt_tokens.get(request.request_id, 0)
            self.num_prompt_tokens[request.request_id] = seen + num_prompt
        tokens, accepted = {}, {}
        for part in scheduler_output.scheduled:
            if part.samples:
                end = part.start + part.num_new_tokens
                ends = range(end - len(part.draft_token_ids), end + 1)
                contexts = [self._read(part.block_table, each) for each in ends]
                sampled = [self._sample(part.request, context) for context in contexts]
                request_id = part.request.request_id
                accepted[request_id], tokens[request_id] = accept_draft(
                    part.draft_token_ids, sampled
                )
        return StepOutput(tokens=tokens, num_accepted=accepted, forward_s=0.001, host_s=0.0001)

    def _read(self, block_table: list[int], num_tokens: int) -> list[int]:
        size = self.info.block_size
        read = [self.memory[block_table[i // size]][i % size] for i in range(num_tokens)]
        assert None not in read, "a slot was read before it was written"
        return read  # type: ignore[return-value]

    def _sample(self, request: Request, context: list[int]) -> TokenOutput:
        error = self.row_errors.pop(request.request_id, None)
        if error is not None:
            return TokenOutput(token_id=-1, error=error)
        refusal = self.row_refusals.pop(request.request_id, None)
        if refusal is not None:
            return TokenOutput(token_id=-1, error=refusal, is_refusal=True)
        script = self.script.get(request.request_id, ())
        index = len(context) - request.num_prompt_tokens
        token_id = script[index] if index < len(script) else fake_next_token(context)
        logprobs = None if request.params.logprobs is None else TokenLogprobs(-0.5)
        return TokenOutput(token_id, logprobs)


class Harness:
    """A scheduler and a fake runner on a simulated clock: one second a step, checked after each."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        max_len: int = 4096,
        script: Mapping[str, Sequence[int]] | None = None,
        check_every: int = 1,
        **settings: object,
    ) -> None:
        self.runner = FakeRunner(num_blocks=num_blocks, block_size=block_size, script=script)
        kv = KVCacheManager(num_blocks, block_size, model_version="fake-1")
        chosen = SchedulerSettings(**{"slots": 4, **settings})  # type: ignore[arg-type]
        memory = PoolMemory(
            1024, 2 * num_blocks * 1024, self.runner.move_blocks, self.runner.resize_kv
        )
        self.scheduler = Scheduler(chosen, kv, max_len=max_len, eos_token_ids=(EOS,), memory=memory)
        # Steps between two full checks, for tests of thousands of steps.
        self.check_every = check_every
        self.num_steps = 0
        self.now_s = 0.0
        self.ended: list[Request] = []
        self.started: list[Request] = []
        self.num_preempted = 0

    @property
    def kv(self) -> KVCacheManager:
        return self.scheduler.kv

    def add(self, *requests: Request) -> None:
        for request in requests:
            request.arrival_s = self.now_s
            self.scheduler.add(request, self.now_s)

    def tune(self, **changes: object) -> None:
        settings = replace(self.scheduler.settings, **changes)  # type: ignore[arg-type]
        self.scheduler.apply(settings, self.now_s)

    def step(self) -> SchedulerOutput | None:
        self.now_s += 1.0
        self.num_steps += 1
        output = self.scheduler.schedule(self.now_s)
        self._check()
        if output is not None:
            assert output.num_tokens == sum(part.num_new_tokens for part in output.scheduled)
            assert output.num_tokens <= self.scheduler.settings.max_num_batched_tokens
            step_output = self.runner.execute(output)
            self.scheduler.update_from_output(output, step_output, self.now_s)
            self._check()
        self._take_news()
        return output

    def _check(self) -> None:
        if self.num_steps % self.check_every == 0:
            self.scheduler.check_integrity()

    def _take_news(self) -> None:
        news = self.scheduler.take_news()
        self.ended += news.ended
        self.started += news.started
        self.num_preempted += len(news.preempted)

    def run(self, max_steps: int = 10_000) -> int:
        """Step until nothing is left; returns the number of steps."""
        steps = 0
        while self.scheduler.has_unfinished():
            assert steps < max_steps, "requests are left that never end"
            self.step()
            steps += 1
        self._take_news()
        return steps

    def running_ids(self) -> list[str]:
        return [run.request.request_id for run in self.scheduler.running]


def fake_config(**changes: object) -> EngineConfig:
    return EngineConfig(model_dir=Path("fake"), **{"max_num_seqs": 4, **changes})  # type: ignore[arg-type]
