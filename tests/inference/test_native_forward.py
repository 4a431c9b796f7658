"""The compiled forward pass against the readable one in fp32, on the same weights."""

import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inference.outputs import ScheduledRequest, SchedulerOutput
from inference.runner.input_batch import build_input_batch
from inference.weights.header import GROUPS_FILE, GROUPS_FORMAT
from kernels import int8_kv
from tests.inference.group_folders import write_groups
from tests.inference.native_steps import (
    CPU,
    KERNELS,
    MAX_POSITIONS,
    NUM_BLOCKS,
    WIDE,
    Texts,
    assert_close,
    compare,
    native,
    oracle,
)
from tests.inference.tiny_models import VOCAB_SIZE, make_request, save_tiny_model
from tests.kernels.native_cases import random_super_blocks


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "family",
    ["llama", "llama-llama3", "llama-dynamic", "mistral-no-window", "qwen2", "qwen3"],
)
def test_steps_agree_with_the_readable_forward_pass(tmp_path, family, kernels) -> None:
    save_tiny_model(family, tmp_path, max_position_embeddings=MAX_POSITIONS)
    compare(tmp_path, kernels, Texts(30, 30, 60))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_block_sizes(tmp_path, block_size, kernels) -> None:
    save_tiny_model("llama", tmp_path, **WIDE)
    compare(tmp_path, kernels, Texts(30, 30, 60, block_size=block_size))


@pytest.mark.parametrize("kernels", KERNELS)
def test_tied_embeddings(tmp_path, kernels) -> None:
    save_tiny_model("llama", tmp_path, **WIDE, tie_word_embeddings=True)
    compare(tmp_path, kernels, Texts(30, 30, 60))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_keys_and_values_in_eight_bits(tmp_path, family, kernels) -> None:
    save_tiny_model(family, tmp_path, max_position_embeddings=MAX_POSITIONS)
    texts = Texts(30, 30, 60)
    reference, wanted = oracle(tmp_path)
    forward, storage = native(tmp_path, kernels, kv_dtype=torch.int8)
    for chunks in ([(0, 0, 20), (1, 0, 1)], [(1, 1, 1), (0, 20, 3)], [(0, 23, 1), (1, 2, 1)]):
        assert_close(texts.step(forward, chunks), texts.step(reference, chunks), kernels)
    slots = texts.slots(0)[:24]
    for cache, scales, exact in (
        (storage.key_cache, storage.key_scales, wanted.key_cache),
        (storage.value_cache, storage.value_scales, wanted.value_cache),
    ):
        assert scales is not None
        # The first layer's keys and values come before anything that magnifies roundings.
        got = int8_kv.dequantise(cache, scales)[0].flatten(0, 1)[slots]
        want = exact[0].flatten(0, 1)[slots]
        step = want.abs().amax(dim=-1, keepdim=True) / 127
        slack = 0.01 * want.abs().amax()  # the embedding is rounded to bf16
        assert ((got - want).abs() <= 0.51 * step + slack).all()
        unused = torch.ones(NUM_BLOCKS * 8, dtype=torch.bool)
        unused[torch.cat([slots, texts.slots(1)[:3]])] = False
        assert scales.flatten(1, 2)[:, unused].isnan().all()


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_text_longer_than_a_split_of_its_context(tmp_path, kernels) -> None:
    save_tiny_model("llama", tmp_path, **WIDE)
    texts = Texts(320)
    reference, _ = oracle(tmp_path)
    forward, _ = native(tmp_path, kernels)
    for chunk in ((0, 0, 310), (0, 310, 1), (0, 311, 8)):
        assert_close(texts.step(forward, [chunk]), texts.step(reference, [chunk]), kernels)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("tied", [False, True])
def test_quantised_groups(tmp_path, tied, kernels) -> None:
    save_tiny_model("llama", tmp_path, **WIDE, tie_word_embeddings=tied)
    write_groups(tmp_path)
    forward, _ = native(tmp_path, kernels)
    assert forward.quantised
    plain, _ = native(tmp_path, kernels, use_groups=False)
    assert not plain.quantised
    compare(tmp_path, kernels, Texts(30, 30, 60))


@pytest.mark.parametrize("kernels", KERNELS)
def test_super_blocks_mixed_within_one_stack(tmp_path, kernels) -> None:
    """As in files of the kind Q4_K_M: v has more bits than q and k beside it."""
    save_tiny_model(
        "llama",
        tmp_path,
        **WIDE | {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8},
    )
    rng = torch.Generator().manual_seed(8)
    weights = load_file(tmp_path / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not name.endswith(("_proj.weight", "lm_head.weight")):
            continue
        bits = 6 if "v_proj" in name or "lm_head" in name else 5 if "down_proj" in name else 4
        part = random_super_blocks(rng, *weight.shape, bits=bits)
        tensors[f"{name.removesuffix('.weight')}.q{bits}_k"] = part.blocks
        weights[name] = part.weight.float()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, tmp_path / GROUPS_FILE, metadata={"format": GROUPS_FORMAT})
    forward, _ = native(tmp_path, kernels)
    assert forward.quantised
    compare(tmp_path, kernels, Texts(30, 30, 60))


def test_a_side_file_of_an_unknown_format_is_ignored(tmp_path) -> None:
    save_tiny_model("llama", tmp_path, **WIDE)
    write_groups(tmp_path)
    tensors = load_file(tmp_path / GROUPS_FILE)
    save_file(tensors, tmp_path / GROUPS_FILE, metadata={"format": "of-tomorrow"})
    forward, _ = native(tmp_path, KERNELS[0])
    assert not forward.quantised


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("quantised", [True, False])
def test_decodes_are_bitwise_the_same_alone_together_and_beside_prompts_a15(
    tmp_path, kernels, quantised
) -> None:
    save_tiny_model("llama", tmp_path, **WIDE)
    if quantised:
        write_groups(tmp_path)
    forward, _ = native(tmp_path, kernels)
    texts = Texts(30, 9, 50, 17, 60)
    for text, length in enumerate((29, 8, 49, 16)):
        texts.step(forward, [(text, 0, length)])
    decodes = [(0, 29, 1), (1, 8, 1), (2, 49, 1), (3, 16, 1)]
    together = texts.step(forward, decodes)
    for index, decode in enumerate(decodes):
        assert torch.equal(texts.step(forward, [decode])[0], together[index])
    for prompt in ((4, 0, 1), (4, 0, 2), (4, 0, 60)):
        assert torch.equal(texts.step(forward, [*decodes, prompt])[:4], together)


def test_tokens_that_do_not_sample_yield_no_logits(tmp_path) -> None:
    save_tiny_model("llama", tmp_path, **WIDE)
    forward, _ = native(tmp_path, KERNELS[0])
    part = ScheduledRequest(make_request([5] * 9), 0, 4, [1], False)
    batch = build_input_batch(SchedulerOutput(1, [part], 4), 8, CPU)
    assert forward.forward(batch).shape == (0, VOCAB_SIZE)


def test_other_threads_run_during_a_step(tmp_path) -> None:
    save_tiny_model("llama", tmp_path, **WIDE)
    forward, _ = native(tmp_path, "portable")
    texts = Texts(500)
    in_step, steps = threading.Event(), []

    def work() -> None:
        for _ in range(3):
            in_step.set()
            texts.step(forward, [(0, 0, 500)])
            steps.append(ticks)

    ticks = 0
    thread = threading.Thread(target=work)
    thread.start()
    assert in_step.wait(30)
    while thread.is_alive():
        ticks += 1
    # Holding the GIL, a step would let this thread tick only between steps.
    assert len(steps) == 3
    assert steps[0] > 0
    assert steps[0] < steps[1] < steps[2]
