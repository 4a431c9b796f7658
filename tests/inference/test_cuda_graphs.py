"""The planning half of CUDA graphs, on the CPU: buckets, padding, buffers; replays are plain calls.

The capture itself is in tests/gpu.
"""

from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
from triton.runtime.jit import JITFunction

from inference.config import ModelConfig
from inference.device_copies import to_device
from inference.kv_cache.storage import KVCacheStorage
from inference.models.decoder import Decoder
from inference.models.registry import decoder_spec
from inference.outputs import ScheduledRequest, SchedulerOutput, StepOutput, TokenOutput
from inference.runner.cuda_graphs import (
    DecodeBuffers,
    GraphedForward,
    batch_buckets,
    bucket_for,
)
from inference.runner.forward import TorchForward
from inference.runner.input_batch import build_input_batch
from inference.runner.model_runner import load_decoder
from inference.runner.profiling import profile_batch
from inference.weights.loader import Checkpoint
from tests.gpu.check import triton_everywhere
from tests.inference.tiny_models import StepDriver, make_request, save_tiny_model

CPU = torch.device("cpu")


def test_buckets_are_dense_enough_and_end_at_the_largest() -> None:
    assert batch_buckets(1) == (1,)
    assert batch_buckets(20) == (1, 2, 4, 8, 12, 16, 20)
    buckets = batch_buckets(256)
    assert buckets[-1] == 256
    for count in range(9, 257):
        assert bucket_for(count, buckets) <= count * 1.5
    assert bucket_for(257, buckets) is None


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    save_tiny_model("llama", folder, num_hidden_layers=2)
    config = ModelConfig.from_dir(folder)
    decoder = load_decoder(
        decoder_spec(config),
        Checkpoint(folder),
        max_positions=64,
        dtype=torch.float32,
        device=CPU,
        on_progress=lambda share, text: None,
    )
    return config, decoder


def storage_of(config: ModelConfig) -> KVCacheStorage:
    return KVCacheStorage(config, num_blocks=40, block_size=8, dtype=torch.float32, device=CPU)


def answers(forward, storage, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers of unlike length, so that steps mix, shrink and change buckets."""
    requests = [make_request(prompt, f"r{row}") for row, prompt in enumerate(prompts)]

    def execute(step):
        logits = forward.forward(build_input_batch(step, storage.block_size, CPU))
        names = [part.request.request_id for part in step.scheduled if part.samples]
        ids = logits.argmax(dim=-1).tolist()
        return StepOutput({n: TokenOutput(i) for n, i in zip(names, ids, strict=True)})

    driver = StepDriver(execute, num_blocks=40, block_size=8)
    for count in (2, 5, 9):
        driver.run(requests[: len(requests) - count // 3], count, budget=13)
    return [request.output_token_ids for request in requests]


@torch.inference_mode()
def test_padded_decodes_answer_as_the_plain_forward_pass(parts) -> None:
    config, decoder = parts
    prompts = [[5, 9, 40], [7] * 11, [3, 1, 4, 1, 5], [2, 2], [90, 8, 70, 6, 50, 4, 30]]
    plain_storage, storage = storage_of(config), storage_of(config)
    sizes: list[int] = []

    def capture(call):
        def replay():
            logits = call()
            sizes.append(logits.shape[0])
            return logits

        return replay

    graphed = GraphedForward(decoder, storage, max_requests=4, max_blocks=8, capture=capture)
    want = answers(TorchForward(decoder, plain_storage), plain_storage, prompts)
    assert answers(graphed, storage, prompts) == want
    assert {2, 4} <= set(sizes)  # and five requests, beyond every bucket, were computed too


@torch.inference_mode()
def test_a_storage_that_moved_is_captured_again_and_capturing_writes_nothing(parts) -> None:
    config, decoder = parts
    storage = storage_of(config)
    captured: list[int] = []

    def capture(call):
        captured.append(call().shape[0])
        return call

    graphed = GraphedForward(decoder, storage, max_requests=4, max_blocks=8, capture=capture)
    prompts = [[5, 9, 40], [7] * 11, [3, 1, 4]]
    want = answers(graphed, storage, prompts)
    before = storage.key_cache.clone()
    storage._reallocate(storage.num_blocks + 5)
    captured.clear()
    graphed.on_storage_moved()
    assert captured == [4, 2, 1]
    assert torch.equal(storage.key_cache[:, : before.shape[1]], before)
    assert answers(graphed, storage, prompts) == want


def test_rows_past_the_step_become_padding() -> None:
    buffers = DecodeBuffers(4, 6, CPU)
    request = make_request([1, 2, 3, 4, 5, 6, 7, 8, 9])
    part = ScheduledRequest(request, 8, 1, [7, 2, 5], samples=True)
    batch = build_input_batch(SchedulerOutput(0, [part], 1), 4, CPU)
    view = buffers.view(4)
    buffers.fill(batch, 4)
    assert view.slot_mapping.tolist() == [20, -1, -1, -1]
    assert view.seq_lens.tolist() == [9, 0, 0, 0]
    assert view.block_tables[0, :3].tolist() == [7, 2, 5]
    assert view.query_start_loc.tolist() == [0, 1, 2, 3, 4]


def test_one_copy_carries_every_array_in_its_dtype_and_shape() -> None:
    arrays = {
        "ids": np.arange(5),
        "table": np.arange(6, dtype=np.int32).reshape(2, 3),
        "none": np.zeros(0, np.int64),
        "view": np.arange(8)[::2],
    }
    # "meta" takes the way of a device; what a copy holds is compared on the CPU's.
    shapes = {
        name: (t.dtype, t.shape) for name, t in to_device(arrays, torch.device("meta")).items()
    }
    for name, tensor in to_device(arrays, CPU).items():
        assert np.array_equal(tensor.numpy(), arrays[name])
        assert shapes[name] == (tensor.dtype, tensor.shape)


@torch.inference_mode()
def test_the_profiled_step_is_as_large_as_asked_and_writes_nothing(parts) -> None:
    config, decoder = parts
    storage = storage_of(config)
    batch = profile_batch(100, 60, CPU)
    assert batch.seq_lens.tolist() == [60, 40]
    logits = decoder(batch, storage)
    assert logits.shape[0] == 100
    assert logits.isfinite().all()
    assert storage.key_cache.count_nonzero() == 0


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=str)
@torch.inference_mode()
def test_a_decode_step_asks_the_device_nothing_and_is_few_launches(parts, kv_dtype) -> None:
    """On the meta device any question fails; a capture would fail on the same ones."""
    config, _ = parts
    device = torch.device("meta")
    decoder = Decoder(decoder_spec(config), max_positions=64, dtype=torch.bfloat16, device=device)
    storage = KVCacheStorage(config, num_blocks=40, block_size=8, dtype=kv_dtype, device=device)
    launched: Counter[str] = Counter()

    def launch(kernel: JITFunction, *args: object, **kwargs: object) -> None:
        launched[kernel.__name__] += 1

    step = DecodeBuffers(4, 8, device).view(4)
    with mock.patch.object(JITFunction, "run", launch), triton_everywhere():
        logits = decoder(step, storage)
    assert logits.shape == (4, decoder.spec.vocab_size)
    layers = len(decoder.spec.layers)
    del launched["_merge_splits_kernel"]  # there when the device has many multiprocessors
    assert launched == {
        "_rms_norm_kernel": 1,
        "_add_rms_norm_kernel": 2 * layers,
        "_rotary_kv_write_kernel": layers,
        "_paged_decode_kernel": layers,
        "_silu_and_mul_kernel": layers,
    }
