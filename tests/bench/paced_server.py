"""The real server, engine and text layer around a runner that computes nothing.

Every step takes the same time and gives every request its next word, so that what the event loop's
thread does for a token can be counted on any machine, however busy.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from inference.outputs import RunnerInfo, SchedulerOutput, StepOutput, TokenOutput

WORDS = " the team measures what one token costs on its way to the reader"


class PacedRunner:
    """Implements `inference.outputs.Runner`."""

    def __init__(self, token_ids: list[int], vocab_size: int, step_s: float) -> None:
        self._token_ids = token_ids
        self._vocab_size = vocab_size
        self._step_s = step_s

    def load(self, on_progress: Callable[[float, str], None]) -> RunnerInfo:
        return RunnerInfo(
            model_name="paced",
            vocab_size=self._vocab_size,
            max_model_len=8192,
            eos_token_ids=(0,),
            num_blocks=32_768,
            block_size=16,
            bytes_per_block=1024,
            default_max_num_batched_tokens=8192,
            device="cpu",
            dtype="float32",
            backend="paced",
        )

    def execute(self, scheduler_output: SchedulerOutput) -> StepOutput:
        time.sleep(self._step_s)
        ids = self._token_ids
        return StepOutput(
            {
                part.request.request_id: TokenOutput(ids[part.request.num_tokens % len(ids)])
                for part in scheduler_output.scheduled
                if part.samples
            }
        )

    def move_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Holds nothing that could move."""

    def resize_kv(self, num_blocks: int) -> None:
        """Holds nothing."""

    def close(self) -> None:
        """Holds nothing."""


def main(port: str, model_dir: str, step_ms: str) -> None:
    from appliance.asgi import application
    from appliance.serving.engine_backend import EngineBackend
    from appliance.serving.server import ApplianceServer
    from appliance.serving.start import listen
    from appliance.serving.web_server import WebServer
    from inference.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_dir(Path(model_dir))
    token_ids = list(tokenizer.encode(WORDS, allow_special=False))

    def runner(config: Any) -> PacedRunner:
        return PacedRunner(token_ids, tokenizer.vocab_size, float(step_ms) / 1e3)

    server = ApplianceServer(
        WebServer(application, listen("127.0.0.1", int(port))),
        EngineBackend(lambda report: Path(model_dir), runner, config={}),
        None,
        url=f"http://127.0.0.1:{port}/",
        drain_s=0.0,
        say=lambda text: print(text, flush=True),
    )
    sys.exit(server.run())
