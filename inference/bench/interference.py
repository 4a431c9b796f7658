"""What a long prompt does to answers that are being written, on the real engine.

Chunked prefill (Sarathi-Serve, arXiv:2403.02310) bounds it: while the prompt is computed, an answer
waits for one chunk at most between two of its tokens.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inference.bench.paths import RecordingRunner, Step, request_of, run_all
from inference.config import EngineConfig
from inference.engine import Engine

# Answers run this many steps before the prompt comes.
_STEPS_BEFORE = 16


@dataclass(frozen=True, slots=True)
class Interference:
    """Milliseconds between two tokens of a running answer, and of one chunk computed alone."""

    num_streams: int
    prompt_tokens: int
    undisturbed_ms: float
    median_ms: float
    p95_ms: float
    chunk_ms: float

    @property
    def ratio(self) -> float:
        """p95 of the gaps over the cost of a chunk; the goal is 2 at most."""
        return self.p95_ms / self.chunk_ms


def measure(model_dir: Path, num_streams: int, context: int, prompt_tokens: int) -> Interference:
    """Load the model with the default chunk of this device and measure. Blocks until done."""
    from inference.runner.model_runner import ModelRunner

    config = EngineConfig(model_dir=model_dir, enable_prefix_cache=False)
    runner = RecordingRunner(ModelRunner(config))
    engine = Engine(config, runner)
    engine.start()
    engine.wait_ready(600)
    try:
        # Every step shall give each answer one token.
        engine.tune(speculation="off", slots=num_streams + 1)
        run_all([engine.add_request(request_of(engine, 0, prompt_tokens, 1))])
        alone = list(runner.steps)
        runner.steps.clear()
        _disturb(engine, num_streams, context, prompt_tokens, len(alone))
        return summary(alone, list(runner.steps), num_streams, prompt_tokens)
    finally:
        engine.shutdown(0)


def _disturb(
    engine: Engine,
    num_streams: int,
    context: int,
    prompt_tokens: int,
    chunks: int,
) -> None:
    # A chunk is smaller by the answers' tokens, so there are some more of them than alone.
    length = 2 * (_STEPS_BEFORE + 2 * chunks)
    answers = [
        engine.add_request(request_of(engine, 1 + i, context, length)) for i in range(num_streams)
    ]
    received = 0
    while received < _STEPS_BEFORE:
        update = answers[-1].get(600)
        assert update is not None, "an answer ended before the prompt came"
        received += len(update.token_ids)
    answers.append(engine.add_request(request_of(engine, 1 + num_streams, prompt_tokens, 1)))
    run_all(answers)


def summary(
    alone: Sequence[Step], steps: Sequence[Step], num_streams: int, prompt_tokens: int
) -> Interference:
    """From the steps of the prompt by itself and of the prompt beside `num_streams` answers."""
    largest = max(step.num_tokens for step in alone)
    chunks = [(step.ended_s - step.started_s) * 1e3 for step in alone if step.num_tokens == largest]
    calm, disturbed = [], []
    for before, step in itertools.pairwise(steps):
        gap_ms = (step.ended_s - before.ended_s) * 1e3
        # The answers take one token each, so whatever is more is of the prompt that came.
        if step.num_requests == before.num_requests == step.num_tokens == num_streams:
            calm.append(gap_ms)
        elif step.num_requests == num_streams + 1 and before.num_requests >= num_streams:
            disturbed.append(gap_ms)
    return Interference(
        num_streams,
        prompt_tokens,
        statistics.median(calm),
        statistics.median(disturbed),
        sorted(disturbed)[math.ceil(len(disturbed) * 0.95) - 1],
        statistics.median(chunks),
    )
