"""A storm: everything at once on a real small model, every invariant checked after each step.

Requests of every kind come, leave and are preempted, some with several choices, some read slowly or
not at all, while settings change, the pool grows and shrinks, and steps, sampler and memory fail.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from inference.config import EngineConfig
from inference.engine import Engine
from inference.errors import RequestRejected
from inference.grammar.constraint import Constraint
from inference.outputs import RunnerInfo, SchedulerOutput, StepOutput, TokenOutput
from inference.request import FinishReason, Request, RequestClass
from inference.runner.model_runner import ModelRunner
from inference.sampling_params import SamplingParams
from inference.streams import RequestStream
from tests.inference.structured import COMPILER, VOCAB_SIZE

NUM_BLOCKS = 24
BLOCK_SIZE = 8
STARTS = [list(range(60, 60 + n)) for n in (0, 5, 16, 37)]
PERSON = Constraint("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 20},
    {"temperature": 1.0, "seed": 5, "min_p": 0.05, "logit_bias": {90: 3.0}},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.7, "seed": 1, "frequency_penalty": 0.6, "presence_penalty": 0.2},
    {"temperature": 0.0, "logprobs": 3, "min_tokens": 6},
    {"temperature": 0.0, "stop_token_ids": (77, 101, 130)},
    {"temperature": 0.9, "seed": 11, "constraint": PERSON},
    {"temperature": 0.0, "constraint": PERSON},
]
TUNES: list[dict[str, Any]] = [
    {"slots": 2},
    {"slots": 7},
    {"slots": "auto"},
    {"max_num_batched_tokens": 3},
    {"max_num_batched_tokens": 40},
    {"speculation": "on"},
    {"speculation": "off"},
    {"speculation": "auto"},
    {"max_waiting_requests": 3},
    {"max_waiting_requests": 1000},
    {"max_model_len": 64},
    {"max_model_len": "auto"},
    {"policy": "static"},
    {"policy": "continuous"},
    {"enable_prefix_cache": False},
    {"enable_prefix_cache": True},
    {"max_running_per_owner": 1},
    {"max_running_per_owner": 0},
    {"max_blocks_per_owner": 12},
    {"max_blocks_per_owner": 0},
    {"admission_headroom": 0.3},
    {"admission_headroom": 0.0},
    {"reserve_tokens": 50},
    {"reserve_tokens": 0},
    {"reserved_interactive_slots": 1},
    {"class_weights": {"background": 3.0}},
    {"class_weights": "strict"},
    {"owner_weights": {"bob": 4.0}},
    {"aging_s": 0.5},
]


# With which nothing is kept from anybody.
FAIR_WEATHER: dict[str, Any] = {
    "policy": "continuous",
    "slots": 4,
    "max_num_batched_tokens": 24,
    "max_running_per_owner": 0,
    "max_blocks_per_owner": 0,
    "reserved_interactive_slots": 0,
    "admission_headroom": 0.0,
    "reserve_tokens": 0,
    "kv_memory_share": "auto",
}


class ShakyRunner(ModelRunner):
    """Fails a step when told to; never two in a row, since three would end the engine."""

    # Before the model has computed it or after, for memory, in the sampler, or one row of it.
    FAULTS = ("before", "after", "memory", "sampler", "row")
    fail: str | None = None
    _did_fail = False

    def load(self, on_progress: Callable[[float, str], None]) -> RunnerInfo:
        """As on a machine whose memory holds twice the pool."""
        info = super().load(on_progress)
        return replace(info, kv_budget_bytes=2 * NUM_BLOCKS * info.bytes_per_block)

    def execute(self, scheduler_output: SchedulerOutput) -> StepOutput:
        failing = None if self._did_fail else self.fail
        self.fail, self._did_fail = None, failing is not None
        if failing == "before":
            raise RuntimeError("the step failed")
        if failing == "memory":
            raise torch.OutOfMemoryError("no memory is left")
        if failing in ("sampler", "row"):
            return self._with_bad_sampler(scheduler_output, fails=failing == "sampler")
        output = super().execute(scheduler_output)
        if failing == "after":
            raise RuntimeError("the step failed late")
        return output

    def _with_bad_sampler(self, step: SchedulerOutput, *, fails: bool) -> StepOutput:
        assert self._loaded is not None
        sampler = self._loaded.sampler
        sample = sampler.sample

        def spoiled(logits: torch.Tensor, requests: list[Request]) -> list[TokenOutput]:
            if not fails:
                logits[-1] = torch.nan
            outputs = sample(logits, requests)
            if fails:
                raise RuntimeError("the sampler failed when it had drawn")
            return outputs

        with mock.patch.object(sampler, "sample", spoiled):
            return super().execute(step)


class Storm:
    def __init__(self, folder: Path, seed: int, **config: Any) -> None:
        self.random = random.Random(seed)
        self.now_s = 1000.0
        chosen = EngineConfig(
            model_dir=folder,
            device="cpu",
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            num_threads=1,
            max_num_seqs=4,
            max_num_batched_tokens=24,
            **config,
        )
        self.runner = ShakyRunner(chosen)
        self.engine = Engine(chosen, self.runner, clock=lambda: self.now_s)
        self.engine.load()
        self.streams: dict[Request, RequestStream] = {}
        # Tokens that were read so far, and those whose reader has left.
        self.read: dict[Request, list[int]] = {}
        self.num_ends: dict[Request, int] = {}
        self.left: set[Request] = set()
        self.num_failing = 0

    def add(self, parent: Request | None = None) -> None:
        """A request, or a further choice of `parent`."""
        draw = self.random
        kind = draw.choice(KINDS)
        tail = [draw.randrange(40, VOCAB_SIZE) for _ in range(draw.randrange(1, 40))]
        prompt = [*draw.choice(STARTS), *tail]
        owner = draw.choice(["alice", "bob", "carol"])
        params = SamplingParams(**{"max_tokens": draw.choice([draw.randrange(1, 60), 120]), **kind})
        if params.min_tokens > (params.max_tokens or 0):
            return
        request = Request(
            request_id=f"r{len(self.streams)}",
            prompt_token_ids=prompt if parent is None else list(parent.prompt_token_ids),
            params=params,
            owner=owner if parent is None else parent.owner,
            cache_scope=owner if parent is None else parent.cache_scope,
            request_class=draw.choice(list(RequestClass)),
            num_public_prefix_tokens=(
                draw.choice([0, 16]) if parent is None else parent.num_public_prefix_tokens
            ),
            arrival_s=self.now_s,
            queue_deadline_s=draw.choice([None, None, None, self.now_s + 60]),
            fork_of=None if parent is None else parent.request_id,
            grammar=params.constraint and COMPILER.compile_now(params.constraint),
        )
        try:
            self.streams[request] = self.engine.add_request(request)
        except RequestRejected:
            return
        self.read[request], self.num_ends[request] = [], 0

    def add_choices(self) -> None:
        """Of one that came before, or of one that comes with them."""
        if self.random.random() < 0.5 or not self.streams:
            self.add()
        if self.streams:
            parent = self.random.choice(list(self.streams)[-3:])
            for _ in range(self.random.randrange(1, 4)):
                self.add(parent)

    def take(self, request: Request) -> None:
        """What is there for the reader, once: at most one update, however late it looks."""
        update = self.streams[request].take()
        if update is not None:
            assert not self.num_ends[request], "something came after the end"
            self.read[request] += update.token_ids
            self.num_ends[request] += update.finish_reason is not None
            assert self.streams[request].take() is None

    def look(self) -> None:
        """Some read; the others are slow."""
        for request in self.random.sample(list(self.streams), k=min(3, len(self.streams))):
            if request not in self.left:
                self.take(request)

    def leave(self) -> None:
        if self.streams:
            request = self.random.choice(list(self.streams))
            self.streams[request].close()
            self.left.add(request)

    def abort(self) -> None:
        if self.streams:
            request = self.random.choice(list(self.streams))
            reason = self.random.choice([FinishReason.ABORT, FinishReason.STOP])
            self.engine.abort(request.request_id, reason)

    def tune(self) -> None:
        draw = self.random
        chance = draw.random()
        if chance < 0.3:
            self.engine.tune(**FAIR_WEATHER)
        elif chance < 0.5:
            self.engine.tune(kv_memory_share=draw.choice([0.4, 0.55, "auto", 0.8]))
        else:
            self.engine.tune(**draw.choice(TUNES))

    def step(self) -> bool:
        self.now_s += 1.0
        did_step = self.engine.step()
        self.engine._scheduler.check_integrity()
        return did_step

    def steps(self) -> None:
        for _ in range(self.random.randrange(1, 5)):
            self.step()

    def blow(self, num_moves: int) -> None:
        moves: list[tuple[Callable[[], object], int]] = [
            (self.add, 7),
            (self.add_choices, 1),
            (self.steps, 16),
            (self.look, 3),
            (self.abort, 1),
            (self.leave, 1),
            (self.tune, 4),
            (self.fail, 1),
        ]
        names, weights = zip(*moves, strict=True)
        for _ in range(num_moves):
            self.random.choices(names, weights)[0]()

    def fail(self) -> None:
        self.runner.fail = self.random.choice(ShakyRunner.FAULTS)
        self.num_failing += 1
        self.step()

    def calm(self) -> None:
        """Until all have ended: each step goes on with somebody, and nobody waits for ever."""
        self.runner.fail = None
        self.engine.tune(**FAIR_WEATHER)
        scheduler = self.engine._scheduler
        did_step, steps = self.step(), 1
        # Each token once, and as often again for what is preempted.
        most = 2 * sum(request.max_len for request in scheduler.unfinished())
        while scheduler.has_unfinished():
            assert did_step, "requests wait, and nothing runs"
            did_step = self.step()
            steps += 1
            assert steps < most, "requests are left that never end"
        self.step()


def alone(folder: Path, requests: list[Request], **config: Any) -> dict[Request, list[int]]:
    """What each says with the engine to itself: as far as it came, and a token more if it may."""
    storm = Storm(folder, 0, **config)
    # With as much room as a storm's pool has at most, or answers would end at another context.
    storm.engine.tune(speculation="off", enable_prefix_cache=False, kv_memory_share=0.8)
    storm.step()
    said = {}
    for request in requests:
        most = max(len(request.output_token_ids) + 1, request.params.min_tokens)
        params = replace(request.params, max_tokens=min(most, request.params.max_tokens or most))
        twin = Request(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            params=params,
            owner="alone",
            cache_scope="alone",
            grammar=request.grammar,
        )
        storm.engine.add_request(twin)
        while storm.engine.step():
            pass
        said[request] = twin.output_token_ids
    storm.engine.shutdown(0.0)
    return said
