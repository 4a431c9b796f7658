"""The compiled forward pass against the readable one in fp32, on the same weights."""

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inference.config import EngineConfig, ModelConfig
from inference.kv_cache.storage import KVCacheStorage
from inference.models.registry import decoder_spec
from inference.outputs import ScheduledRequest, SchedulerOutput
from inference.runner.forward import Forward, ForwardUnavailable, TorchForward
from inference.runner.input_batch import build_input_batch
from inference.runner.model_runner import ModelRunner, load_decoder
from inference.runner.native_forward import make_native_forward
from inference.weights.header import GROUPS_FILE, GROUPS_FORMAT
from inference.weights.loader import Checkpoint
from kernels import int8_kv
from kernels.native import library
from tests.inference.group_folders import write_groups
from tests.inference.tiny_models import VOCAB_SIZE, make_request, save_tiny_model
from tests.kernels.native_cases import random_super_blocks, usable_kernels

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


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


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


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("mistral", "sliding window"),
        ("gemma2", "sliding window"),
        ("granite", "Llama's shape"),
        ("olmo2", "Llama's shape"),
        ("smollm3", "Llama's shape"),
        ("llama-tied-biased", "Llama's shape"),
        ("phi3-longrope-partial", "Llama's shape"),
    ],
)
def test_other_models_are_left_to_torch_with_a_reason(tmp_path, family, words) -> None:
    save_tiny_model(family, tmp_path)
    with pytest.raises(ForwardUnavailable, match=words):
        native(tmp_path, KERNELS[0])


def test_settings_that_rule_it_out_give_a_reason(tmp_path) -> None:
    save_tiny_model("llama", tmp_path, **WIDE)
    config = ModelConfig.from_dir(tmp_path)

    def make(settings: dict[str, Any], dtype: torch.dtype, **more: Any) -> None:
        make_native_forward(
            EngineConfig(model_dir=tmp_path, **settings),
            config,
            tmp_path,
            storage_of(tmp_path, dtype),
            lambda share, text: None,
            **more,
        )

    with pytest.raises(ForwardUnavailable, match="set to float32"):
        make({"dtype": "float32"}, torch.bfloat16)
    with pytest.raises(ForwardUnavailable, match="keys and values in bfloat16 or int8"):
        make({}, torch.float32)
    with pytest.raises(ForwardUnavailable, match="cannot run the sse9 kernels"):
        make({}, torch.bfloat16, kernels="sse9")


def test_without_a_compiler_torch_serves_and_the_notice_says_why(tmp_path, monkeypatch) -> None:
    save_tiny_model("llama", tmp_path, **WIDE)

    def fail() -> None:
        raise library.NativeUnavailable("there is no C++ compiler on this machine")

    monkeypatch.setattr(library, "load", fail)
    runner = ModelRunner(
        EngineConfig(model_dir=tmp_path, device="cpu", num_blocks=64, num_threads=1)
    )
    info = runner.load(lambda share, text: None)
    assert info.backend == "torch"
    assert "no C++ compiler" in info.notice
    runner.close()


def test_the_runner_takes_the_compiled_step(tmp_path) -> None:
    save_tiny_model("llama", tmp_path, **WIDE)
    runner = ModelRunner(
        EngineConfig(model_dir=tmp_path, device="cpu", num_blocks=64, num_threads=1)
    )
    info = runner.load(lambda share, text: None)
    assert info.backend == f"native {library.kernels_title(KERNELS[0])}"
    assert info.notice == ""
    assert info.dtype == "bfloat16"
    runner.close()


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_runner_keeps_keys_and_values_in_eight_bits_when_asked(tmp_path, backend) -> None:
    save_tiny_model("llama", tmp_path, **WIDE)
    shared = {"model_dir": tmp_path, "device": "cpu", "num_blocks": 64, "num_threads": 1}
    infos = []
    for kv_dtype in ("int8", "auto"):
        runner = ModelRunner(EngineConfig(**shared, kv_dtype=kv_dtype, cpu_backend=backend))
        infos.append(runner.load(lambda share, text: None))
        runner.close()
    eight, plain = infos
    assert (eight.kv_dtype, plain.kv_dtype) == ("int8", plain.dtype)
    # The calculation is the same one; a token's head takes 32 bytes and a scale.
    assert (eight.dtype, eight.backend) == (plain.dtype, plain.backend)
    width = 2 if backend == "native" else 4
    assert eight.bytes_per_block / plain.bytes_per_block == (32 + 4) / (32 * width)


def test_missing_tensors_are_named(tmp_path) -> None:
    save_tiny_model("llama", tmp_path, **WIDE)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.2.mlp.down_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Exception, match=r"layers\.2\.mlp\.down_proj\.weight"):
        native(tmp_path, KERNELS[0])


TEXT = (
    "A lighthouse keeper counts the ships that pass each night. On clear evenings there are many, "
    "and she writes their lights into a book: green to starboard, red to port, white at the mast. "
    "When fog comes in from the west she counts horns instead, and the book has a column for those."
)


@pytest.fixture(scope="module")
def real_text(bundled_model_dir: Path) -> tuple[list[int], Tensor]:
    """TEXT's ids, and what transformers in fp32 says after each: log-probabilities, float64."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    ids = Tokenizer.from_file(str(bundled_model_dir / "tokenizer.json")).encode(TEXT).ids
    model = AutoModelForCausalLM.from_pretrained(bundled_model_dir, dtype=torch.float32)
    with torch.inference_mode():
        return ids, model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def mean_divergence(forward: Forward, ids: list[int], want: Tensor, chunk: int) -> float:
    """Mean KL from `want`, teacher forced: a logits row for every token of every chunk."""
    rows = []
    for start in range(0, len(ids), chunk):
        count = min(chunk, len(ids) - start)
        part = ScheduledRequest(make_request(ids), start, count, list(range(NUM_BLOCKS)), True)
        batch = build_input_batch(SchedulerOutput(1, [part], count), 16, CPU)
        rows.append(forward.forward(replace(batch, logits_indices=torch.arange(count))).clone())
    got = torch.cat(rows).double().log_softmax(-1)
    return float((want.exp() * (want - got)).sum(-1).mean())


@pytest.mark.model
@pytest.mark.parametrize("use_groups", [True, False])
@pytest.mark.parametrize(
    ("kernels", "chunk"),
    [(KERNELS[0], 1), *((kernels, chunk) for kernels in KERNELS for chunk in (16, 100))],
)
def test_the_real_model_keeps_its_distribution(
    bundled_model_dir, real_text, kernels, use_groups, chunk
) -> None:
    forward, _ = native(bundled_model_dir, kernels, 16, use_groups=use_groups)
    assert forward.quantised == use_groups
    # Transformers' own bf16 has 1.2e-3 on this model.
    assert mean_divergence(forward, *real_text, chunk) <= 1.2e-3


@pytest.mark.model
@pytest.mark.parametrize(
    ("kernels", "chunk"), [(KERNELS[0], 1), *((kernels, 100) for kernels in KERNELS)]
)
def test_the_real_model_with_keys_and_values_in_eight_bits(
    bundled_model_dir, real_text, kernels, chunk
) -> None:
    forward, _ = native(bundled_model_dir, kernels, 16, kv_dtype=torch.int8)
    # 1e-3 with fp32 activations; those in bf16 add their own 5e-4. See inference/README.md.
    assert mean_divergence(forward, *real_text, chunk) <= 2e-3
