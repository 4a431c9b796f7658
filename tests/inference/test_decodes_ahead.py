"""Steps whose decodes were computed before they were planned answer as steps that were not.

On the CPU; replays are plain calls that write all their logits to the same memory, as graphs do.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from inference.config import EngineConfig, ModelConfig
from inference.engine import Engine
from inference.kv_cache.storage import KVCacheStorage, bytes_per_block
from inference.outputs import ScheduledRequest, SchedulerOutput
from inference.request import Request
from inference.runner.cuda_graphs import GraphedForward
from inference.runner.decodes_ahead import NUM_SPARE_BLOCKS, DecodesAhead
from inference.runner.input_batch import InputBatch
from inference.runner.model_runner import ModelRunner, load_decoder
from inference.sampler import Sampler
from inference.weights.loader import Checkpoint
from tests.gpu.check import triton_everywhere
from tests.inference.engine_driving import collect
from tests.inference.tiny_models import StepDriver, make_request, save_tiny_model

CPU = torch.device("cpu")
BLOCK_SIZE = 8
MOST_REQUESTS = 6


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    save_tiny_model("llama", folder, num_hidden_layers=2)
    return folder


def replayed_into_one_memory():
    memory: list[Tensor] = []

    def capture(call):
        logits = call()
        if not memory:  # the largest is captured first
            memory.append(torch.empty_like(logits))

        def replay() -> Tensor:
            return memory[0][: logits.shape[0]].copy_(call())

        return replay

    return capture


class PlannedRunner(ModelRunner):
    """A runner on the CPU that replays as one on a GPU does, and computes what is planned."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        # Of each step: requests, and those of them that were computed before.
        self.steps: list[tuple[int, int]] = []

    def _make_forward(self, model_config, spec, max_model_len, device, on_progress):
        config = self._config
        decoder = load_decoder(
            spec,
            Checkpoint(config.model_dir),
            max_positions=max_model_len,
            dtype=torch.float32,
            device=CPU,
            on_progress=on_progress,
        )
        dtype = self._kv_dtype(torch.float32)
        most_blocks = 2 * config.num_blocks
        self._kv_budget_bytes = most_blocks * bytes_per_block(model_config, BLOCK_SIZE, dtype)
        storage = KVCacheStorage(
            model_config,
            num_blocks=config.num_blocks,
            block_size=BLOCK_SIZE,
            dtype=dtype,
            capacity=most_blocks,
            device=CPU,
            num_spare=NUM_SPARE_BLOCKS,
        )
        forward = GraphedForward(
            decoder,
            storage,
            max_requests=MOST_REQUESTS,
            max_blocks=-(-max_model_len // BLOCK_SIZE),
            capture=replayed_into_one_memory(),
        )
        return forward, storage, ""

    def load(self, on_progress):
        info = super().load(on_progress)
        self._loaded.ahead = None
        return info


class AheadRunner(PlannedRunner):
    """One that goes on after each step."""

    def load(self, on_progress):
        info = ModelRunner.load(self, on_progress)
        ahead = self._loaded.ahead
        take = ahead.take

        def counted(step: SchedulerOutput):
            taken = take(step)
            num_left = len(step.scheduled if taken is None else taken.rest.scheduled)
            self.steps.append((len(step.scheduled), len(step.scheduled) - num_left))
            return taken

        ahead.take = counted
        return info


def config_of(folder: Path, **settings: object) -> EngineConfig:
    plain = {"device": "cpu", "dtype": "float32", "cpu_backend": "torch", "num_threads": 1}
    plain |= {"num_blocks": 60, "block_size": BLOCK_SIZE}
    return EngineConfig(model_dir=folder, **(plain | settings))


def start(folder: Path, runner: type[ModelRunner], **settings: object):
    made = runner(config_of(folder, **settings))
    return made, made.load(lambda share, text: None)


PROMPTS = [[5, 9, 40], [7] * 11, [3, 1, 4, 1, 5], [2, 2], [90, 8, 70, 6, 50, 4, 30]]
# What a request may ask of the sampler.
KINDS: list[dict[str, object]] = [
    {},
    {"temperature": 0.9, "seed": 4},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "seed": 5},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"logprobs": 3, "min_tokens": 4, "logit_bias": {17: 3.0}},
]


def answers(folder: Path, runner: type[ModelRunner], **settings: object):
    """Ids and logprobs of requests that end, join and lose their blocks; and the runner."""
    made, info = start(folder, runner, **settings)
    driver = StepDriver(made.execute, num_blocks=info.num_blocks, block_size=BLOCK_SIZE)
    requests = [
        make_request(prompt, f"r{row}", **kind)
        for row, (prompt, kind) in enumerate(zip(PROMPTS, KINDS, strict=True))
    ]
    logprobs = []
    for count, num_tokens in ((2, 5), (5, 12), (4, 25), (3, 40)):
        while any(len(each.output_token_ids) < num_tokens for each in requests[:count]):
            output = driver.step(requests[:count], budget=13)
            logprobs.append({name: token.logprobs for name, token in output.tokens.items()})
        driver.preempt(requests[1])
    made.close()
    return [each.output_token_ids for each in requests], logprobs, made


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_answers_are_those_of_steps_computed_when_planned(folder, kv_dtype) -> None:
    want, want_logprobs, _ = answers(folder, ModelRunner, kv_dtype=kv_dtype)
    got, got_logprobs, runner = answers(folder, AheadRunner, kv_dtype=kv_dtype)
    assert got == want
    for step, want_step in zip(got_logprobs, want_logprobs, strict=True):
        for name, token in want_step.items():
            assert (token is None) == (step[name] is None)
            if token is not None:
                assert step[name].token_logprob == pytest.approx(token.token_logprob, abs=1e-5)
    whole = sum(count == taken for count, taken in runner.steps)
    assert whole > 0.7 * len(runner.steps)


@pytest.mark.parametrize("seed", range(6))
def test_an_engine_that_is_disturbed_in_every_way_answers_the_same(folder, seed) -> None:
    """Ends, aborts, forks, cached prefixes, preemptions, drafts and moved blocks, in one order."""
    told = []
    for kind in (PlannedRunner, AheadRunner):
        numbers = random.Random(seed)
        runner = kind(config_of(folder, num_blocks=24))
        engine = Engine(runner._config, runner)
        engine.load()
        engine.tune(max_num_batched_tokens=24, slots=6, speculation="on" if seed % 2 else "off")
        streams = []
        for step in range(120):
            if step < 70 and numbers.random() < 0.25:
                streams += [engine.add_request(each) for each in some_requests(numbers, step)]
            if streams and numbers.random() < 0.05:
                engine.abort(numbers.choice(streams).request_id)
            if numbers.random() < 0.03:
                engine.tune(kv_memory_share=numbers.choice([0.3, 0.8, "auto"]))
            engine.step()
            engine._scheduler.check_integrity()
        while engine.step():
            pass
        told.append([collect(stream) for stream in streams])
        engine.shutdown(0.0)
    for want, got in zip(*told, strict=True):
        assert got.token_ids == want.token_ids
        assert got.finish_reason == want.finish_reason
    assert sum(taken for _, taken in runner.steps) > 0.3 * sum(count for count, _ in runner.steps)


def some_requests(numbers: random.Random, step: int) -> Sequence[Request]:
    """One request, or two with one prompt; some prompts come again."""
    prompt = [numbers.randrange(3, 150) for _ in range(numbers.choice([3, 8, 16, 30]))]
    if numbers.random() < 0.4:
        prompt = [11, 12, 13, 14] * 5
    params: dict[str, object] = {"max_tokens": numbers.randrange(1, 40)}
    if numbers.random() < 0.4:
        params |= {"temperature": 1.0, "seed": numbers.randrange(100)}
    requests = [make_request(prompt, f"s{step}", **params)]
    if numbers.random() < 0.3:
        fork = make_request(prompt, f"s{step}-fork", **params)
        fork.fork_of = requests[0].request_id
        requests.append(fork)
    return requests


# ---- what is taken of what was computed


class OneHot:
    """A forward pass whose logits say which token each row was computed from."""

    def __init__(self) -> None:
        self.batches: list[InputBatch] = []

    def forward(self, batch: InputBatch) -> Tensor:
        self.batches.append(batch)
        return torch.nn.functional.one_hot(batch.input_ids, 100).float()


@pytest.fixture
def made(folder) -> tuple[DecodesAhead, OneHot]:
    storage = KVCacheStorage(
        ModelConfig.from_dir(folder),
        num_blocks=40,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        device=CPU,
        num_spare=NUM_SPARE_BLOCKS,
    )
    forward = OneHot()
    return DecodesAhead(forward, storage, most_requests=30, max_len=64), forward


def decode(request: Request, start: int, *table: int) -> ScheduledRequest:
    return ScheduledRequest(request, start, 1, list(table), samples=True)


def step_of(*parts: ScheduledRequest) -> SchedulerOutput:
    return SchedulerOutput(1, list(parts), sum(part.num_new_tokens for part in parts))


def go_on(ahead: DecodesAhead, parts: Sequence[ScheduledRequest], ids: Sequence[int]) -> None:
    ahead.plan(step_of(*parts))
    ahead.start(torch.tensor(ids))


@pytest.fixture
def requests() -> list[Request]:
    return [make_request([5, 6, 7], f"r{row}") for row in range(3)]


def test_the_next_token_of_each_is_computed_from_the_ids_on_the_device(made, requests) -> None:
    ahead, forward = made
    go_on(ahead, [decode(each, 2, row) for row, each in enumerate(requests)], [21, -1, 23])
    (batch,) = forward.batches
    assert batch.input_ids.tolist() == [21, 0, 23]
    assert batch.positions.tolist() == [3, 3, 3]
    assert batch.slot_mapping.tolist() == [3, 8 + 3, 16 + 3]
    assert batch.seq_lens.tolist() == [4, 4, 4]
    taken = ahead.take(step_of(*[decode(each, 3, row) for row, each in enumerate(requests)]))
    assert taken.rest.scheduled == []
    assert taken.join(None).argmax(dim=-1).tolist() == [21, 0, 23]
    assert ahead.take(step_of(decode(requests[0], 3, 0))) is None


def test_rows_are_given_in_the_order_of_the_plan_with_the_rest_between(made, requests) -> None:
    ahead, _ = made
    first, late, last = requests
    go_on(ahead, [decode(first, 2, 0), decode(last, 2, 2)], [21, 23])
    drafted = ScheduledRequest(late, 3, 3, [1], samples=True, draft_token_ids=[8, 9])
    chunk = ScheduledRequest(make_request([4] * 9, "chunk"), 0, 5, [6], samples=False)
    taken = ahead.take(step_of(decode(last, 3, 2), drafted, decode(first, 3, 0), chunk))
    assert taken.rest.scheduled == [drafted, chunk]
    assert taken.rest.num_tokens == 8
    computed = torch.nn.functional.one_hot(torch.tensor([31, 32, 33]), 100).float()
    assert taken.join(computed).argmax(dim=-1).tolist() == [23, 31, 32, 33, 21]


def test_what_was_planned_otherwise_is_computed_again(made, requests) -> None:
    ahead, _ = made
    elsewhere = [
        decode(requests[0], 1, 0),
        decode(requests[0], 3, 9),
        decode(make_request([5, 6, 7], "r0"), 3, 0),
        ScheduledRequest(requests[0], 3, 2, [0], samples=True, draft_token_ids=[8]),
        ScheduledRequest(requests[0], 3, 1, [0], samples=False),
    ]
    for part in elsewhere:
        go_on(ahead, [decode(requests[0], 2, 0)], [21])
        assert ahead.take(step_of(part)) is None
        ahead._rest = 0
    go_on(ahead, [decode(requests[0], 2, 0)], [21])
    ahead.drop()
    assert ahead.take(step_of(decode(requests[0], 3, 0))) is None


def test_a_token_without_a_block_waits_in_a_spare_one(made) -> None:
    ahead, forward = made
    some = [make_request([5] * 8, f"r{row}") for row in range(NUM_SPARE_BLOCKS + 1)]
    parts = [decode(each, 7, row) for row, each in enumerate(some)]
    go_on(ahead, parts, [20] * len(parts))
    assert forward.batches == []
    go_on(ahead, parts[1:], [20] * NUM_SPARE_BLOCKS)
    blocks = forward.batches[0].block_tables[:, 1].tolist()
    assert sorted(blocks) == list(range(40, 40 + NUM_SPARE_BLOCKS))
    storage = ahead._storage
    storage.key_cache[:, blocks[2], 0] = 7.0
    ahead.take(step_of(decode(some[3], 8, 3, 30)))
    assert storage.key_cache[:, 30, 0].eq(7.0).all()
    assert storage.key_cache[:, 30, 1:].eq(0.0).all()


@pytest.mark.parametrize(
    ("length", "max_tokens", "max_len"), [(3, 1, 0), (3, 5, 4), (63, None, 0)], ids=str
)
def test_a_request_that_ends_with_the_step_is_left_out(
    made, requests, length, max_tokens, max_len
) -> None:
    ahead, forward = made
    ending = make_request([5] * length, "ending", max_tokens=max_tokens)
    ending.max_len = max_len
    last = ScheduledRequest(ending, 0, length, list(range(10, 18)), samples=True)
    go_on(ahead, [decode(requests[0], 2, 0), last, decode(requests[1], 2, 1)], [21, 22, 23])
    assert forward.batches[0].input_ids.tolist() == [21, 23]


def test_nothing_is_computed_before_a_large_step(made, requests) -> None:
    ahead, forward = made
    chunk = ScheduledRequest(requests[0], 0, 2, [0], samples=False)
    go_on(ahead, [decode(requests[1], 2, 1), chunk], [21])
    drafted = ScheduledRequest(requests[2], 2, 2, [2], samples=True, draft_token_ids=[8])
    go_on(ahead, [drafted], [21, 22])
    many = [make_request([5, 6, 7], f"m{row}") for row in range(31)]
    go_on(ahead, [decode(each, 2, row) for row, each in enumerate(many)], [20] * 31)
    assert forward.batches == []


def test_it_rests_longer_each_time_that_it_is_of_little_use(made, requests) -> None:
    ahead, forward = made
    rests = []
    for _ in range(3):
        count = len(forward.batches)
        rest = -1
        while len(forward.batches) == count:
            go_on(ahead, [decode(requests[0], 2, 0)], [21])
            rest += 1
        rests.append(rest)
        ahead.take(step_of(decode(requests[1], 3, 1)))
    assert rests == [0, 1, 2]
    for used in (True, False):
        ahead._rest = 0
        go_on(ahead, [decode(requests[0], 2, 0)], [21])
        ahead.take(step_of(decode(requests[0 if used else 1], 3, 0)))
    assert ahead._rest == 1


def test_sampling_asks_the_device_nothing_before_the_device_goes_on() -> None:
    """On the meta device any question fails."""
    requests = [
        make_request([5, 9], f"r{row}", **({"seed": row} | kind)) for row, kind in enumerate(KINDS)
    ]

    class WentOn(Exception):
        pass

    def go_on(token_ids: Tensor) -> None:
        assert token_ids.shape == (len(KINDS),)
        raise WentOn

    logits = torch.empty(len(KINDS), 100, device="meta")
    launches = mock.patch.object(JITFunction, "run")
    with launches, triton_everywhere(), pytest.raises(WentOn):
        Sampler(100, [2]).sample(logits, requests, go_on)
