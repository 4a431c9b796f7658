"""An engine over a fake runner, driven step by step, and its streams read to their ends."""

import threading
import time

from inference.outputs import StreamUpdate

# Far past what a busy machine takes.
DEADLINE_S = 60.0


class Clock:
    """Simulated: a second a step."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s

    def step(self, engine, count):
        for _ in range(count):
            self.now_s += 1.0
            engine.step()


def until(condition):
    deadline = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        pause.wait(0.002)


def collect(stream):
    """Everything of a stream merged; asserts the single end."""
    total = StreamUpdate()
    while (update := stream.get(DEADLINE_S)) is not None:
        assert total.finish_reason is None
        total.token_ids += update.token_ids
        total.logprobs += update.logprobs
        total.num_cached_tokens = update.num_cached_tokens
        total.finish_reason, total.finish_detail = update.finish_reason, update.finish_detail
    assert total.finish_reason is not None
    return total


def step_out(engine):
    while engine.step():
        pass
