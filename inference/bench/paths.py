"""Decode and prefill speed of one forward path, on the real engine. One process a path.

A path is written `backend:dtype` with further words behind: a set of kernels (`avx2`), `dense`
(bf16 weights instead of quantised groups), `int8` (keys and values in 8 bits), as in
`native:bfloat16:avx2:int8`. Each runs in a process of its own, since a process keeps the thread
pool of whichever path ran first. Times are the engine thread's own, step by step, so that they hold
the scheduler and the sampler too.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inference.bench import floor
from inference.config import EngineConfig
from inference.engine import Engine
from inference.outputs import Runner, RunnerInfo, SchedulerOutput, StepOutput
from inference.request import Request
from inference.sampling_params import SamplingParams
from inference.streams import RequestStream

# Steps left out at the start of a level: caches and clocks settle.
_WARM_STEPS = 4


@dataclass(frozen=True, slots=True)
class Step:
    """One step as the runner saw it; the gap from one start to the next holds the host time."""

    num_requests: int
    num_tokens: int
    started_s: float
    ended_s: float


class RecordingRunner:
    """A runner that keeps when each step ran. Owner: the engine thread."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.steps: list[Step] = []

    def load(self, on_progress: Callable[[float, str], None]) -> RunnerInfo:
        return self._runner.load(on_progress)

    def execute(self, scheduler_output: SchedulerOutput) -> StepOutput:
        started_s = time.perf_counter()
        output = self._runner.execute(scheduler_output)
        ended_s = time.perf_counter()
        num_requests, num_tokens = len(scheduler_output.scheduled), scheduler_output.num_tokens
        self.steps.append(Step(num_requests, num_tokens, started_s, ended_s))
        return output

    def move_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._runner.move_blocks(pairs)

    def resize_kv(self, num_blocks: int) -> None:
        self._runner.resize_kv(num_blocks)

    def close(self) -> None:
        self._runner.close()


@dataclass(slots=True)
class Level:
    """Figures of one batch size (decode) or prompt length (prefill)."""

    kind: str
    size: int
    context: int
    # Median and spread of a whole step, host part included; for prefill, of the whole prompt.
    step_ms: float
    least_ms: float
    most_ms: float
    tokens_per_s: float
    # Least time that the machine could take (`floor.py`); None for prefill.
    floor_ms: float | None = None


def config_of(path: str, model_dir: Path, max_num_seqs: int) -> EngineConfig:
    """The engine of a path as it is written.

    Raises:
        ValueError: the path is not `backend:dtype` and known words.
    """
    backend, dtype, *words = path.split(":")
    options: dict[str, Any] = {}
    for word in words:
        if word == "dense":
            options["use_groups"] = False
        elif word == "int8":
            options["kv_dtype"] = "int8"
        else:
            options["cpu_kernels"] = word
    return EngineConfig(
        model_dir=model_dir,
        cpu_backend=backend,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        enable_prefix_cache=False,
        **options,
    )


def measure(
    model_dir: Path,
    path: str,
    *,
    batches: Sequence[int],
    context: int,
    prompts: Sequence[int],
    num_tokens: int,
) -> dict[str, object]:
    """Load the model on this path and measure every level; JSON-able."""
    from inference.runner.model_runner import ModelRunner

    config = config_of(path, model_dir, max(batches))
    runner = RecordingRunner(ModelRunner(config))
    engine = Engine(config, runner)
    engine.start()
    engine.wait_ready(600)
    info = engine.info
    if config.cpu_kernels and info.notice:
        raise SystemExit(f"{path}: {info.notice}")
    try:
        # A step with drafts holds more than one token a request.
        engine.tune(speculation="off")
        levels = [_decode(engine, runner, batch, context, num_tokens) for batch in batches]
        levels += [_prefill(engine, runner, length) for length in prompts]
    finally:
        engine.shutdown(0)
    rates = floor.measure(info.dtype)
    work = floor.step_work(
        model_dir,
        reads_groups=info.backend.startswith("native") and config.use_groups,
        dtype=info.dtype,
        kv_dtype=info.kv_dtype,
    )
    for level in levels:
        if level.kind == "decode":
            level.floor_ms = work.floor_ms(rates, level.size, context)
    return {
        "path": path,
        "backend": " ".join([info.backend, *path.split(":")[1:]]),
        "read_bytes_per_s": rates.read_bytes_per_s,
        "flops_per_s": rates.flops_per_s,
        "levels": [asdict(level) for level in levels],
    }


def _decode(
    engine: Engine, runner: RecordingRunner, batch: int, context: int, num_tokens: int
) -> Level:
    """Steps in which exactly `batch` requests decode, at about `context` tokens each."""
    runner.steps.clear()
    prompt = max(1, context - num_tokens // 2)
    run_all(
        engine.add_request(request_of(engine, i, prompt, num_tokens + _WARM_STEPS))
        for i in range(batch)
    )
    full = [
        (second.started_s - first.started_s) * 1e3
        for first, second in zip(runner.steps, runner.steps[1:], strict=False)
        if first.num_requests == first.num_tokens == second.num_requests == batch
    ][_WARM_STEPS:]
    median = statistics.median(full)
    return Level("decode", batch, context, median, min(full), max(full), batch / median * 1e3)


def _prefill(engine: Engine, runner: RecordingRunner, length: int, repeats: int = 3) -> Level:
    """A prompt alone, in chunks of the engine's budget."""
    times = []
    for i in range(repeats):
        runner.steps.clear()
        run_all([engine.add_request(request_of(engine, i, length, 1))])
        times.append((runner.steps[-1].ended_s - runner.steps[0].started_s) * 1e3)
    median = statistics.median(times)
    return Level("prefill", length, length, median, min(times), max(times), length / median * 1e3)


def request_of(engine: Engine, number: int, num_prompt_tokens: int, max_tokens: int) -> Request:
    """A greedy request of an owner of its own, with a prompt that no other number has."""
    vocab = engine.info.vocab_size
    ids = [100 + (number * 7919 + 31 * i) % (vocab - 200) for i in range(num_prompt_tokens)]
    return Request(
        request_id=f"bench-{number}-{time.perf_counter_ns()}",
        prompt_token_ids=ids,
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        owner=f"bench-{number}",
        cache_scope="bench",
    )


def run_all(streams: Iterable[RequestStream]) -> None:
    """Read every stream to its end. All are queued before the first is read."""
    for stream in list(streams):
        while stream.get(600) is not None:
            pass
