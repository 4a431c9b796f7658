"""Model folders of every supported family, small and random, and a driver that plans steps by hand.

The weights are spread wider than a fresh model's, norms and biases too, so that a wrong scale, a
forgotten offset or a mask off by one changes which token is most likely.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from inference.config import EngineConfig, ModelConfig
from inference.kv_cache.storage import KVCacheStorage
from inference.models.registry import decoder_spec
from inference.outputs import ScheduledRequest, SchedulerOutput, StepOutput
from inference.request import Request
from inference.runner.forward import TorchForward
from inference.runner.input_batch import build_input_batch
from inference.runner.model_runner import ModelRunner, load_decoder
from inference.sampling_params import SamplingParams
from inference.weights.loader import Checkpoint

VOCAB_SIZE = 160
CPU = torch.device("cpu")
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.2, 1.5],
    "long_factor": [1.5, 3.0, 6.0],
    "original_max_position_embeddings": 16,
}
# What is particular about each; the rest is _SHAPE.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-biased": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}},
    ),
    "llama-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 3.0}},
    ),
    "llama-yarn": ("llama", {"rope_parameters": _YARN}),
    "mistral": ("mistral", {"sliding_window": 11}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"sliding_window": 9, "query_pre_attn_scalar": 12}),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": 9,
            "query_pre_attn_scalar": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "phi3": ("phi3", {"sliding_window": 13}),
    "phi3-longrope-partial": (
        "phi3",
        {
            "rope_parameters": _LONGROPE | {"partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 16,
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.7,
            "logits_scaling": 0.5,
        },
    ),
    "olmo2": ("olmo2", {}),
}


def save_tiny_model(
    family: str, folder: Path, *, max_shard_size: str = "1GB", **changes: Any
) -> PreTrainedModel:
    """Write a model folder; returns the same model as transformers has it, in fp32."""
    model_type, particular = FAMILIES[family]
    fields = _SHAPE | particular | changes
    if model_type == "phi3":
        # Its configuration checks sizes against hidden_size // num_attention_heads.
        assert fields["head_dim"] * fields["num_attention_heads"] == fields["hidden_size"]
    config = AutoConfig.for_model(model_type, **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(len(family))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if "norm" in name or name.endswith("bias") else 0.25
            centre = parameter.mean().round() if "norm" in name else 0.0
            parameter.copy_(centre + spread * torch.randn(parameter.shape, generator=generator))
    model.eval()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def greedy_of_transformers(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """The oracle's answer, computed from the whole text at every token: no cache involved."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def make_request(prompt: Sequence[int], name: str = "request", **params: Any) -> Request:
    params.setdefault("temperature", 0.0)
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        params=SamplingParams(**params),
        owner="user:1",
        cache_scope="user:1",
    )


class StepDriver:
    """Runs requests through `execute` in a given token budget, on blocks in a shuffled order.

    Plans as the scheduler does: decodes first, then chunks of prompts within the budget.
    """

    def __init__(
        self,
        execute: Callable[[SchedulerOutput], StepOutput],
        *,
        num_blocks: int,
        block_size: int,
        seed: int = 0,
    ) -> None:
        self._execute = execute
        self._block_size = block_size
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self.tables: dict[str, list[int]] = {}
        self._steps = 0

    def step(self, requests: Sequence[Request], budget: int) -> StepOutput | None:
        """One step; None when no request has anything to compute."""
        parts: list[ScheduledRequest] = []
        left = budget
        by_need = sorted(requests, key=lambda each: each.num_tokens - each.num_computed_tokens > 1)
        for request in by_need:
            count = min(request.num_tokens - request.num_computed_tokens, left)
            if count > 0:
                parts.append(self._part(request, count))
                left -= count
        if not parts:
            return None
        self._steps += 1
        output = self._execute(SchedulerOutput(self._steps, parts, budget - left))
        for part in parts:
            part.request.num_computed_tokens += part.num_new_tokens
            if part.samples:
                token = output.tokens[part.request.request_id]
                part.request.output_token_ids.append(token.token_id)
        return output

    def run(self, requests: Sequence[Request], num_tokens: int, budget: int = 1000) -> None:
        """Until each request has `num_tokens` of output."""
        while True:
            open_ones = [each for each in requests if len(each.output_token_ids) < num_tokens]
            if not open_ones:
                return
            self.step(open_ones, budget)

    def preempt(self, request: Request) -> None:
        """Take its blocks; the next step computes prompt and output again, in other blocks."""
        self._free = self.tables.pop(request.request_id) + self._free
        request.num_computed_tokens = 0

    def _part(self, request: Request, count: int) -> ScheduledRequest:
        start = request.num_computed_tokens
        table = self.tables.setdefault(request.request_id, [])
        while len(table) * self._block_size < start + count:
            table.append(self._free.pop())
        samples = start + count == request.num_tokens
        return ScheduledRequest(request, start, count, list(table), samples)


def random_prompts(*lengths: int, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    numbers = random.Random(11)
    return [[numbers.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def started(folder: Path, **config: object) -> tuple[ModelRunner, StepDriver]:
    settings = {"num_blocks": 64, "block_size": 8, "dtype": "float32", "num_threads": 1} | config
    runner = ModelRunner(EngineConfig(model_dir=folder, device="cpu", **settings))  # type: ignore[arg-type]
    info = runner.load(lambda share, text: None)
    return runner, StepDriver(
        runner.execute, num_blocks=info.num_blocks, block_size=info.block_size
    )


def logits_of_chunks(
    folder: Path, prompt: list[int], chunks: list[int], max_positions: int = 256
) -> torch.Tensor:
    """Logits after the last chunk, [vocab_size]; blocks in falling order."""
    config = ModelConfig.from_dir(folder)
    storage = KVCacheStorage(config, num_blocks=16, block_size=8, dtype=torch.float32, device=CPU)
    with torch.inference_mode():
        decoder = load_decoder(
            decoder_spec(config),
            Checkpoint(folder),
            max_positions=max_positions,
            dtype=torch.float32,
            device=CPU,
            on_progress=lambda share, text: None,
        )
        forward = TorchForward(decoder, storage)
        request = make_request(prompt)
        start = 0
        for count in chunks:
            samples = start + count == len(prompt)
            part = ScheduledRequest(request, start, count, list(range(15, -1, -1)), samples)
            batch = build_input_batch(SchedulerOutput(1, [part], count), 8, CPU)
            logits = forward.forward(batch)
            assert logits.shape == (int(samples), config.vocab_size)
            start += count
    return logits[0]
