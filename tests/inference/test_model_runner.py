"""The runner as the engine sees it: load, info, steps."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference.config import EngineConfig, InvalidConfig, ModelConfig
from inference.errors import ModelLoadError, NotEnoughMemory
from inference.kv_cache.storage import (
    CPU_MAX_FULL_CONTEXTS,
    KVCacheStorage,
    bytes_per_block,
    choose_num_blocks,
    free_memory,
)
from inference.outputs import RunnerInfo, ScheduledRequest, SchedulerOutput
from inference.runner.input_batch import build_input_batch
from inference.runner.model_runner import ModelRunner
from tests.inference.tiny_models import VOCAB_SIZE, StepDriver, make_request, save_tiny_model

CPU = torch.device("cpu")
PROMPT = [5, 9, 40, 77, 12]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    save_tiny_model("llama", folder, num_hidden_layers=2)
    return folder


@pytest.fixture
def folder(shared_folder: Path, tmp_path: Path) -> Path:
    """A copy that the test may change."""
    copy = tmp_path / "tiny-llama"
    copy.mkdir()
    for path in shared_folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def start(folder: Path, **settings: object) -> tuple[ModelRunner, RunnerInfo]:
    plain = {"dtype": "float32", "num_blocks": 40, "block_size": 8, "num_threads": 1}
    runner = ModelRunner(EngineConfig(model_dir=folder, device="cpu", **(plain | settings)))
    return runner, runner.load(lambda share, text: None)


def driver_of(runner: ModelRunner, info: RunnerInfo, seed: int = 0) -> StepDriver:
    return StepDriver(
        runner.execute, num_blocks=info.num_blocks, block_size=info.block_size, seed=seed
    )


def change(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


# ---- the batch ------------------------------------------------------------------------------


def test_a_mixed_step_becomes_the_tensors_of_its_description() -> None:
    decode = make_request([3] * 9, "decode")
    decode.output_token_ids = [71, 72]
    chunk = make_request(list(range(20, 40)), "chunk")
    last = make_request(list(range(50, 56)), "last")
    step = SchedulerOutput(
        1,
        [
            ScheduledRequest(decode, 10, 1, [4, 2, 9], samples=True),
            ScheduledRequest(chunk, 5, 6, [7, 1], samples=False),
            ScheduledRequest(last, 2, 4, [3], samples=True),
        ],
        11,
    )
    batch = build_input_batch(step, 8, CPU)
    assert batch.input_ids.tolist() == [72, 25, 26, 27, 28, 29, 30, 52, 53, 54, 55]
    assert batch.positions.tolist() == [10, 5, 6, 7, 8, 9, 10, 2, 3, 4, 5]
    slots = [2 * 8 + 2, 61, 62, 63, 8, 9, 10, 26, 27, 28, 29]
    assert batch.slot_mapping.tolist() == slots
    assert batch.block_tables.tolist() == [[4, 2], [7, 1], [3, 0]]
    assert batch.seq_lens.tolist() == [11, 11, 6]
    assert batch.query_start_loc.tolist() == [0, 1, 7, 11]
    assert batch.logits_indices.tolist() == [0, 10]
    assert (batch.num_tokens, batch.num_requests, batch.num_decodes) == (11, 3, 1)
    assert (batch.max_query_len, batch.max_seq_len) == (6, 11)
    for tensor in (batch.input_ids, batch.positions, batch.slot_mapping, batch.logits_indices):
        assert tensor.dtype == torch.int64
    for tensor in (batch.block_tables, batch.seq_lens, batch.query_start_loc):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


# ---- what load tells ------------------------------------------------------------------------


def test_info_of_a_plain_model(shared_folder) -> None:
    runner, info = start(shared_folder)
    runner.close()
    assert info.model_name == "tiny-llama"
    assert info.vocab_size == VOCAB_SIZE
    assert info.max_model_len == 256
    assert info.eos_token_ids == (2,)
    assert (info.num_blocks, info.block_size) == (40, 8)
    # 2 layers, keys and values, 8 tokens, 2 heads of 8 dimensions, 4 bytes
    assert info.bytes_per_block == 2 * 2 * 8 * 2 * 8 * 4
    assert (info.device, info.dtype, info.backend) == ("cpu", "float32", "torch")
    assert info.notice == ""


def test_ids_that_the_tokenizer_lacks_are_outside_a13(folder) -> None:
    vocabulary = {f"token{token_id}": token_id for token_id in range(100)}
    tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": 104, "content": "<end>"}]}
    change(folder / "tokenizer.json", **tokenizer)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][105:] *= 20  # the padded rows shout
    save_file(tensors, folder / "model.safetensors")
    runner, info = start(folder)
    assert info.vocab_size == 105
    requests = [
        make_request(PROMPT, "greedy"),
        make_request(PROMPT, "hot", temperature=2.0, seed=1),
        make_request(PROMPT, "biased", temperature=1.0, logit_bias={150: 100.0}),
    ]
    driver_of(runner, info).run(requests, 20)
    runner.close()
    for request in requests:
        assert max(request.output_token_ids) < 105


def test_every_end_of_sequence_id_is_known_a20(folder) -> None:
    change(folder / "generation_config.json", eos_token_id=[2, 11])
    change(
        folder / "tokenizer.json",
        model={"vocab": [["a", 0.0], ["b", -1.0]]},
        added_tokens=[{"id": 13, "content": "<eot>"}],
    )
    for written in ("<eot>", {"content": "<eot>", "lstrip": False}):
        change(folder / "tokenizer_config.json", eos_token=written)
        runner, info = start(folder)
        runner.close()
        assert info.eos_token_ids == (2, 11, 13)


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {}}', '{"model": {"vocab": 5}}'])
def test_a_broken_tokenizer_file_is_refused(folder, text) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        start(folder)


def test_auto_on_the_cpu_takes_fp32_where_the_compiled_step_cannot_serve(tmp_path) -> None:
    save_tiny_model("gemma2", tmp_path)
    runner, info = start(tmp_path, dtype="auto")
    request = make_request(PROMPT)
    driver_of(runner, info).run([request], 3)
    runner.close()
    assert (info.dtype, info.backend) == ("float32", "torch")
    assert "compiled CPU step" in info.notice


def test_the_torch_step_can_be_asked_for(shared_folder) -> None:
    runner, info = start(shared_folder, dtype="auto", cpu_backend="torch")
    runner.close()
    assert (info.dtype, info.backend, info.notice) == ("float32", "torch", "")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_fp32(shared_folder, dtype) -> None:
    logprobs = {}
    for asked in ("float32", dtype):
        runner, info = start(shared_folder, dtype=asked, cpu_backend="torch")
        assert info.dtype == asked
        request = make_request(PROMPT, logprobs=5)
        output = driver_of(runner, info).step([request], 100)
        logprobs[asked] = dict(output.tokens["request"].logprobs.top)
        runner.close()
    shared = logprobs["float32"].keys() & logprobs[dtype].keys()
    assert len(shared) >= 3
    for token_id in shared:
        # 8 bits of mantissa through two layers of weights far wider than a trained model's
        assert logprobs[dtype][token_id] == pytest.approx(logprobs["float32"][token_id], abs=0.5)


def test_cuda_without_a_device_is_refused(shared_folder, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelLoadError, match="no CUDA device"):
        ModelRunner(EngineConfig(model_dir=shared_folder, device="cuda")).load(lambda s, t: None)


def test_a_longer_context_than_the_model_has_is_refused(shared_folder) -> None:
    with pytest.raises(ModelLoadError, match=r"300.*256"):
        start(shared_folder, max_model_len=300)
    for allowed in (200, 5):  # also one that ends inside the first block
        runner, info = start(shared_folder, max_model_len=allowed)
        runner.close()
        assert info.max_model_len == allowed


def test_settings_out_of_range_are_refused(shared_folder) -> None:
    with pytest.raises(InvalidConfig, match="block_size"):
        start(shared_folder, block_size=7)
    with pytest.raises(InvalidConfig, match="kv_dtype"):
        start(shared_folder, kv_dtype="int4")


# ---- steps ----------------------------------------------------------------------------------


def test_a_prompt_chunk_samples_nothing(shared_folder) -> None:
    runner, info = start(shared_folder)
    driver = driver_of(runner, info)
    request = make_request(PROMPT)
    assert driver.step([request], 3).tokens == {}
    assert list(driver.step([request], 3).tokens) == ["request"]
    runner.close()


def test_an_empty_step_is_harmless(shared_folder) -> None:
    runner, _ = start(shared_folder)
    assert runner.execute(SchedulerOutput(1, [], 0, finished_request_ids=["x"])).tokens == {}
    runner.close()


def test_times_are_told(shared_folder) -> None:
    runner, info = start(shared_folder)
    output = driver_of(runner, info).step([make_request(PROMPT)], 100)
    runner.close()
    assert output.forward_s > 0
    assert output.host_s > 0


def test_copied_blocks_carry_a_request_on(shared_folder) -> None:
    runner, info = start(shared_folder)
    whole = make_request(PROMPT)
    driver = driver_of(runner, info)
    driver.run([whole], 6)

    cut = make_request(PROMPT, "cut")
    driver.run([cut], 3)
    (block,) = driver.tables["cut"]
    unused = driver._free[0]
    moved = ScheduledRequest(cut, cut.num_computed_tokens, 1, [unused], samples=True)
    output = runner.execute(SchedulerOutput(9, [moved], 1, block_copies=[(block, unused)]))
    runner.close()
    assert output.tokens["cut"].token_id == whole.output_token_ids[3]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 42}])
def test_a_preempted_request_ends_as_an_undisturbed_one_a15(shared_folder, params) -> None:
    runner, info = start(shared_folder)
    undisturbed = make_request(PROMPT, "undisturbed", **params)
    driver_of(runner, info).run([undisturbed], 20)

    driver = driver_of(runner, info, seed=1)
    victim = make_request(PROMPT, "victim", **params)
    neighbour = make_request([8] * 30, "neighbour", temperature=1.0)
    driver.run([victim, neighbour], 7)
    driver.preempt(victim)
    driver.run([victim, neighbour], 20, budget=9)
    runner.close()
    assert victim.output_token_ids == undisturbed.output_token_ids


def test_a_request_with_broken_numbers_fails_alone_a14(folder) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][99] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    runner, info = start(folder, num_blocks=12)

    alone = make_request(PROMPT, "alone")
    driver = driver_of(runner, info)
    driver.run([alone], 5)
    driver.preempt(alone)

    poisoned = make_request([5, 99, 12], "poisoned")
    neighbour = make_request(PROMPT, "neighbour")
    output = driver.step([poisoned, neighbour], 100)
    assert output.tokens["poisoned"].error
    assert output.tokens["poisoned"].token_id == -1
    assert neighbour.output_token_ids == alone.output_token_ids[:1]

    # Its blocks, NaN inside, go to others: every block of the pool is used again.
    driver.preempt(poisoned)
    driver.run([neighbour], 5)
    later = [make_request(PROMPT, f"later-{index}") for index in range(5)]
    driver.run(later, 5)
    runner.close()
    for request in (neighbour, *later):
        assert request.output_token_ids == alone.output_token_ids


# ---- memory ---------------------------------------------------------------------------------


def blocks(*, free: int, context: int = 2048, device: torch.device = CPU, **settings: int) -> int:
    config = EngineConfig(model_dir=Path("model"), **settings)
    return choose_num_blocks(
        config, block_bytes=1000, free_bytes=free, max_model_len=context, device=device
    )


def test_the_pool_takes_its_share_of_free_memory() -> None:
    assert blocks(free=4_000_000) == 1000
    assert blocks(free=4_000_000, device=torch.device("cuda")) == 3400


def test_the_pool_of_a_cpu_ends_at_many_full_contexts() -> None:
    assert blocks(free=10**12, context=160) == CPU_MAX_FULL_CONTEXTS * 10
    assert blocks(free=10**12, context=160, kv_memory_bytes=10**9) == 10**6


def test_what_is_configured_holds() -> None:
    assert blocks(free=4_000_000, num_blocks=7) == 7
    assert blocks(free=4_000_000, kv_memory_bytes=50_999) == 50


def test_too_little_memory_is_told_with_numbers() -> None:
    assert blocks(free=64_000) == 16
    with pytest.raises(NotEnoughMemory, match="least that is useful"):
        blocks(free=63_000)
    with pytest.raises(NotEnoughMemory, match="least that is useful"):
        blocks(free=-5)
    with pytest.raises(NotEnoughMemory, match="Set fewer blocks"):
        blocks(free=64_000, num_blocks=65)
    assert blocks(free=4_000, context=16) == 1


def test_weights_that_do_not_fit_are_told_before_reading(shared_folder, monkeypatch) -> None:
    monkeypatch.setattr("inference.runner.model_runner.free_memory", lambda device: 1000)
    with pytest.raises(NotEnoughMemory, match="weights need"):
        start(shared_folder, cpu_backend="torch")


def test_storage_has_the_size_it_says(shared_folder) -> None:
    config = ModelConfig.from_dir(shared_folder)
    storage = KVCacheStorage(config, num_blocks=5, block_size=8, dtype=torch.bfloat16, device=CPU)
    caches = (storage.key_cache, storage.value_cache)
    assert sum(cache.nbytes for cache in caches) == 5 * bytes_per_block(config, 8, torch.bfloat16)
    assert all(cache.shape == (2, 5, 8, 2, 8) for cache in caches)
    assert all(not cache.any() for cache in caches)


def test_storage_in_eight_bits_has_the_size_it_says_and_copies_scales(shared_folder) -> None:
    config = ModelConfig.from_dir(shared_folder)
    storage = KVCacheStorage(config, num_blocks=5, block_size=8, dtype=torch.int8, device=CPU)
    assert storage.key_scales is not None
    assert storage.value_scales is not None
    tensors = (storage.key_cache, storage.value_cache, storage.key_scales, storage.value_scales)
    assert sum(each.nbytes for each in tensors) == 5 * bytes_per_block(config, 8, torch.int8)
    for number, each in enumerate(tensors):
        each[:, 3].fill_(number + 1)
    storage.copy_blocks([(3, 0)])
    for number, each in enumerate(tensors):
        assert each[:, 0].eq(number + 1).all()
        assert not each[:, 1].any()


def test_free_memory_is_at_most_what_a_container_may_take(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("inference.kv_cache.storage._CONTROL_GROUP", tmp_path)
    unlimited = free_memory(CPU)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("900\n")
    assert free_memory(CPU) > 0.5 * unlimited
    (tmp_path / "memory.max").write_text("1500\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 200\n")
    assert free_memory(CPU) == 800
