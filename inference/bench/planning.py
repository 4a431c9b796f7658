"""Cost and quality of planning alone: the runner behind the scheduler computes nothing."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from inference.config import EngineConfig
from inference.engine import Engine
from inference.kv_cache.block_pool import BlockPool
from inference.kv_cache.manager import KVCacheManager
from inference.outputs import RunnerInfo, SchedulerOutput, StepOutput, TokenOutput
from inference.request import Request
from inference.sampling_params import SamplingParams
from inference.scheduler import Scheduler
from inference.scheduling.settings import SchedulerSettings

_TOKEN = TokenOutput(token_id=7)


class NullRunner:
    """Answers every step at once with the same token."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def load(self, on_progress: Callable[[float, str], None]) -> RunnerInfo:
        return RunnerInfo(
            model_name="null",
            vocab_size=1000,
            max_model_len=8192,
            eos_token_ids=(2,),
            num_blocks=self._num_blocks,
            block_size=16,
            bytes_per_block=1,
            default_max_num_batched_tokens=2048,
            device="none",
            dtype="none",
            backend="none",
        )

    def execute(self, scheduler_output: SchedulerOutput) -> StepOutput:
        parts = scheduler_output.scheduled
        return StepOutput({part.request.request_id: _TOKEN for part in parts if part.samples})

    def move_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        pass

    def resize_kv(self, num_blocks: int) -> None:
        pass

    def close(self) -> None:
        pass


def make_engine(slots: int, num_blocks: int, waiting: int) -> Engine:
    config = EngineConfig(
        model_dir=Path(),
        max_num_seqs=slots,
        max_waiting_requests=max(1, waiting),
        max_waiting_tokens=2_000_000_000,
        enable_prefix_cache=False,
    )
    engine = Engine(config, NullRunner(num_blocks))
    engine.load()
    return engine


def step_cost_ms(running: int, waiting: int, steps: int = 200) -> tuple[float, float]:
    """Median and 95th percentile of one step's host time, in ms."""
    engine = make_engine(running, num_blocks=running * 80, waiting=running + waiting)
    for number in range(running + waiting):
        engine.add_request(make_request(number, 64, 1000))
    for _ in range(running // 16 + 20):
        engine.step()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - started) * 1e3)
    times.sort()
    return statistics.median(times), times[int(0.95 * len(times))]


def pool_operations_per_s(num_blocks: int = 16_384, rounds: int = 200) -> float:
    """Blocks taken and given back a second."""
    pool = BlockPool(num_blocks)
    started = time.perf_counter()
    for _ in range(rounds):
        pool.release(pool.allocate(256))
    return 2 * 256 * rounds / (time.perf_counter() - started)


def kv_fill(seed: int = 0, users: int = 16) -> float:
    """Share of allocated KV slots that hold a token, over the load generator's mix of lengths."""
    chooser = random.Random(seed)
    settings = SchedulerSettings(slots=users, enable_prefix_cache=False)
    kv = KVCacheManager(4096, 16, model_version="bench", enable_prefix_cache=False)
    scheduler = Scheduler(settings, kv, max_len=8192, eos_token_ids=(2,))
    for number in range(users * 8):
        prompt = 130 + 13 * chooser.choice((2, 4, 8, 16, 32))
        scheduler.add(make_request(number, prompt, chooser.choice((32, 64, 96, 128, 256))), 0.0)
    runner = NullRunner(4096)
    held = filled = 0
    while scheduler.has_unfinished():
        output = scheduler.schedule(0.0)
        assert output is not None, "work is left and nothing was scheduled"
        scheduler.update_from_output(output, runner.execute(output), 0.0)
        for request_id, table in kv.tables():
            request = scheduler.get(request_id)
            assert request is not None, "a table without a request"
            held += len(table) * 16
            filled += request.num_computed_tokens
    return filled / held


def make_request(number: int, num_prompt_tokens: int, max_tokens: int) -> Request:
    return Request(
        request_id=f"r{number}",
        prompt_token_ids=[10 + number % 900] * num_prompt_tokens,
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        owner=f"user:{number % 50}",
        cache_scope="bench",
    )
