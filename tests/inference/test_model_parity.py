"""Our forward pass against transformers', the same weights in fp32."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from inference.errors import ModelLoadError
from inference.models.registry import ARCHITECTURES
from tests.inference.tiny_models import (
    FAMILIES,
    greedy_of_transformers,
    logits_of_chunks,
    make_request,
    random_prompts,
    save_tiny_model,
    started,
)

# Sums in another order; logits are of size 1 to 10.
TOLERANCE = 2e-4
NUM_TOKENS = 12


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_tiny_model(request.param, folder)


def test_every_architecture_is_covered() -> None:
    covered = {FAMILIES[family][0] for family in FAMILIES}
    assert len(covered) == len(ARCHITECTURES)


@pytest.mark.parametrize("chunks", [[45], [1, 7, 8, 20, 9]], ids=["whole", "chunked"])
def test_logits_are_close(tiny, chunks) -> None:
    folder, oracle = tiny
    (prompt,) = random_prompts(45)
    got = logits_of_chunks(folder, prompt, chunks)
    with torch.inference_mode():
        want = oracle(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)


def test_greedy_tokens_are_exact_alone_and_in_a_mixed_batch(tiny) -> None:
    folder, oracle = tiny
    # transformers changes longrope's factors when a text grows past 16 tokens; we never do.
    shortest = 17 if oracle.config.rope_parameters.get("rope_type") == "longrope" else 1
    texts = random_prompts(shortest + 4, 40, 18, shortest, 26)
    wanted = [greedy_of_transformers(oracle, prompt, NUM_TOKENS) for prompt in texts]
    assert len({tuple(tokens) for tokens in wanted}) > 1, "the oracle says the same to everything"

    runner, driver = started(folder)
    for index, prompt in enumerate(texts):
        request = make_request(prompt, f"alone-{index}")
        driver.run([request], NUM_TOKENS)
        assert request.output_token_ids == wanted[index]
        driver.preempt(request)

    together = [make_request(prompt, f"together-{i}") for i, prompt in enumerate(texts)]
    driver.run(together, NUM_TOKENS, budget=13)
    assert [request.output_token_ids for request in together] == wanted
    runner.close()


def test_longrope_takes_the_short_factors_on_a_short_server(tmp_path) -> None:
    oracle = save_tiny_model("phi3-longrope-partial", tmp_path)
    runner, driver = started(tmp_path, max_model_len=16)
    (prompt,) = random_prompts(6)
    request = make_request(prompt)
    driver.run([request], 8)
    assert request.output_token_ids == greedy_of_transformers(oracle, prompt, 8)
    runner.close()


# How older checkpoints write what newer ones have in layer_types and rope_parameters.
OLDER: dict[str, dict[str, object]] = {
    "llama-llama3": {
        "rope_theta": 500.0,
        "rope_scaling": {
            "type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2-window": {"rope_theta": 10_000.0},
    "gemma2": {"rope_theta": 10_000.0},
    "gemma3": {
        "sliding_window_pattern": 2,
        "rope_theta": 5000.0,
        "rope_local_base_freq": 50.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "phi3-longrope-partial": {
        "partial_rotary_factor": 0.75,
        "rope_theta": 1000.0,
        "rope_scaling": {
            "type": "su",
            "short_factor": [1.0, 1.2, 1.5],
            "long_factor": [1.5, 3.0, 6.0],
        },
    },
    "smollm3": {"rope_theta": 2_000_000.0},
}


@pytest.mark.parametrize("family", OLDER)
def test_an_older_checkpoint_reads_as_the_same_model(tmp_path, family) -> None:
    save_tiny_model(family, tmp_path)
    (prompt,) = random_prompts(45)
    want = logits_of_chunks(tmp_path, prompt, [45])
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for newer in ("layer_types", "rope_parameters", "no_rope_layers"):
        config.pop(newer, None)
    path.write_text(json.dumps(config | OLDER[family]))
    assert torch.equal(logits_of_chunks(tmp_path, prompt, [45]), want)


@pytest.mark.parametrize("family", ["llama-dynamic", "llama-yarn"])
def test_a_stretched_model_reaches_past_its_usual_length(tmp_path, family) -> None:
    oracle = save_tiny_model(family, tmp_path, max_position_embeddings=64)
    (prompt,) = random_prompts(128)
    with torch.inference_mode():
        want = oracle(torch.tensor([prompt])).logits[0, -1]
    got = logits_of_chunks(tmp_path, prompt, [100, 28], max_positions=128)
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)

    runner, _ = started(tmp_path, max_model_len=128)
    runner.close()
    with pytest.raises(ModelLoadError, match="reaches"):
        started(tmp_path, max_model_len=300)


@pytest.mark.model
def test_the_real_model_is_exact_alone_and_in_a_mixed_batch(bundled_model_dir) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(bundled_model_dir, dtype=torch.float32)
    numbers = random.Random(5)
    texts = [[numbers.randrange(100, 40_000) for _ in range(length)] for length in (9, 70, 33)]
    # "The capital of France is", and a fixed text that the model goes on with sensibly.
    texts.append([504, 3575, 282, 4649, 314])
    wanted = []
    for prompt in texts:
        ids = torch.tensor([prompt])
        answer = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=16,
            min_new_tokens=16,
            do_sample=False,
        )
        wanted.append(answer[0, len(prompt) :].tolist())

    runner, driver = started(bundled_model_dir, num_blocks=80, max_model_len=256)
    alone = make_request(texts[1], "alone", min_tokens=16)
    driver.run([alone], 16)
    assert alone.output_token_ids == wanted[1]
    driver.preempt(alone)
    together = [make_request(prompt, f"{i}", min_tokens=16) for i, prompt in enumerate(texts)]
    driver.run(together, 16, budget=32)
    assert [request.output_token_ids for request in together] == wanted
    runner.close()
