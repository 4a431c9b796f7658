"""The compiled forward pass and the readable one side by side, for tests: steps over some texts."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inference.config import EngineConfig, ModelConfig
from inference.kv_cache.storage import KVCacheStorage
from inference.models.registry import decoder_spec
from inference.outputs import ScheduledRequest, SchedulerOutput
from inference.runner.forward import Forward, TorchForward
from inference.runner.input_batch import build_input_batch
from inference.runner.model_runner import load_decoder
from inference.runner.native_forward import make_native_forward
from inference.weights.loader import Checkpoint
from kernels.native import library
from tests.inference.tiny_models import VOCAB_SIZE, make_request
from tests.kernels.native_cases import usable_kernels

KERNELS = usable_kernels()
CPU = torch.device("cpu")
MAX_POSITIONS = 512
NUM_BLOCKS = 96
# A shape whose linears all fit the packed groups.
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
}
# Mean error as a share of the logits' spread. Keys and values are rounded to bf16; bf16 kernels
# round weights and activations too; and these random models magnify roundings: transformers' own
# bf16 is as far off. A wrong position, scale or mask gives about 1.
TOLERANCE = {torch.float32: 0.08, torch.bfloat16: 0.15}


def storage_of(folder: Path, dtype: torch.dtype, block_size: int = 8) -> KVCacheStorage:
    config = ModelConfig.from_dir(folder)
    storage = KVCacheStorage(
        config, num_blocks=NUM_BLOCKS, block_size=block_size, dtype=dtype, device=CPU
    )
    # Whatever lies in memory past a request's tokens must not matter.
    for cache in (storage.key_cache, storage.value_cache):
        cache.fill_(127 if dtype == torch.int8 else torch.nan)
    for scales in (storage.key_scales, storage.value_scales):
        if scales is not None:
            scales.fill_(torch.nan)
    return storage


def oracle(folder: Path, block_size: int = 8) -> tuple[Forward, KVCacheStorage]:
    storage = storage_of(folder, torch.float32, block_size)
    storage.key_cache.zero_()
    storage.value_cache.zero_()
    decoder = load_decoder(
        decoder_spec(ModelConfig.from_dir(folder)),
        Checkpoint(folder),
        max_positions=MAX_POSITIONS,
        dtype=torch.float32,
        device=CPU,
        on_progress=lambda share, text: None,
    )
    return TorchForward(decoder, storage), storage


def native(
    folder: Path,
    kernels: str,
    block_size: int = 8,
    kv_dtype: torch.dtype = torch.bfloat16,
    **settings: Any,
) -> tuple[Any, KVCacheStorage]:
    storage = storage_of(folder, kv_dtype, block_size)
    forward = make_native_forward(
        EngineConfig(model_dir=folder, max_model_len=MAX_POSITIONS),
        ModelConfig.from_dir(folder),
        folder,
        storage,
        lambda share, text: None,
        kernels=kernels,
        **settings,
    )
    return forward, storage


class Texts:
    """Some texts on blocks in a shuffled order, and steps over chunks of them."""

    def __init__(self, *lengths: int, block_size: int = 8, seed: int = 3) -> None:
        numbers = random.Random(seed)
        order = list(range(NUM_BLOCKS))
        numbers.shuffle(order)
        self.block_size = block_size
        self.requests = [
            make_request([numbers.randrange(3, VOCAB_SIZE) for _ in range(length)], f"r{index}")
            for index, length in enumerate(lengths)
        ]
        self.tables = [[order.pop() for _ in range(-(-length // block_size))] for length in lengths]

    def step(self, forward: Forward, chunks: Sequence[tuple[int, int, int]]) -> Tensor:
        """Logits after each chunk (text, start, number of tokens)."""
        parts = [
            ScheduledRequest(self.requests[text], start, count, self.tables[text], True)
            for text, start, count in chunks
        ]
        total = sum(count for _, _, count in chunks)
        batch = build_input_batch(SchedulerOutput(1, parts, total), self.block_size, CPU)
        with torch.inference_mode():
            # The next step may overwrite what this one gave.
            return forward.forward(batch).clone()

    def slots(self, text: int) -> Tensor:
        blocks = torch.tensor(self.tables[text])[:, None] * self.block_size
        slots = (blocks + torch.arange(self.block_size)).flatten()
        return slots[: len(self.requests[text].prompt_token_ids)]


def assert_close(got: Tensor, want: Tensor, kernels: str) -> None:
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    assert mean_error(got, want) < TOLERANCE[library.activations_dtype(kernels)]


def mean_error(got: Tensor, want: Tensor) -> float:
    return ((got - want).abs().mean() / want.std()).item()


def compare(folder: Path, kernels: str, texts: Texts) -> None:
    """A few steps of mixed chunks on both; logits after each, then keys and values."""
    steps = [
        [(0, 0, 20), (1, 0, 1)],
        [(1, 1, 1), (0, 20, 3), (2, 0, 40)],
        [(0, 23, 1), (1, 2, 1), (2, 40, 1)],
    ]
    reference, wanted_storage = oracle(folder, texts.block_size)
    forward, storage = native(folder, kernels, texts.block_size)
    for chunks in steps:
        assert_close(texts.step(forward, chunks), texts.step(reference, chunks), kernels)
    for text, length in ((0, 24), (1, 3), (2, 41)):
        slots = texts.slots(text)[:length]
        for got, want in (
            (storage.key_cache, wanted_storage.key_cache),
            (storage.value_cache, wanted_storage.value_cache),
        ):
            got, want = got.flatten(1, 2)[:, slots].float(), want.flatten(1, 2)[:, slots]
            assert mean_error(got, want) < TOLERANCE[torch.bfloat16]
            # Nothing before the first layer's keys and values magnifies: each one is right.
            torch.testing.assert_close(got[0], want[0], atol=0.05, rtol=0.02)
    used = torch.cat([texts.slots(text)[:n] for text, n in ((0, 24), (1, 3), (2, 41))])
    unused = torch.ones(NUM_BLOCKS * texts.block_size, dtype=torch.bool)
    unused[used] = False
    assert storage.key_cache.flatten(1, 2)[:, unused].isnan().all()
