"""Every family in every form that its checkpoints come in, against transformers in fp32.

Forms: in shards, tied and untied, with biases, stretched positions past the trained length, and
windows shorter and longer than a prompt. What a family is like by itself: `test_model_parity.py`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from inference.config import ModelConfig
from inference.models.registry import decoder_spec
from inference.weights.loader import Checkpoint
from tests.inference.tiny_models import (
    FAMILIES,
    logits_of_chunks,
    random_prompts,
    save_tiny_model,
)

# Sums in another order; logits are of size 1 to 10.
TOLERANCE = 2e-4
# One of each architecture; the others differ in what is changed here.
ARCHITECTURES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "smollm3",
    "granite",
    "olmo2",
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def assert_same_logits(
    oracle: PreTrainedModel, folder: Path, num_tokens: int, max_positions: int = 256
) -> None:
    """After one token, in the middle, and after all: of a prompt in two chunks."""
    (prompt,) = random_prompts(num_tokens)
    with torch.inference_mode():
        want = oracle(torch.tensor([prompt])).logits[0]
    for length in (num_tokens, num_tokens // 2):
        chunks = [length - length // 3, length // 3] if length > 2 else [length]
        got = logits_of_chunks(folder, prompt[:length], chunks, max_positions)
        torch.testing.assert_close(got, want[length - 1], atol=TOLERANCE, rtol=TOLERANCE)


def test_all_architectures_are_in_the_matrix() -> None:
    of_all = {model_type for model_type, _ in FAMILIES.values()}
    assert {FAMILIES[name][0] for name in ARCHITECTURES} == of_all


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_embeddings_tied_or_not_and_weights_in_shards(tmp_path, family, is_tied) -> None:
    oracle = save_tiny_model(family, tmp_path, max_shard_size="40KB", tie_word_embeddings=is_tied)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2, "it was to be in shards"
    assert ("lm_head.weight" in Checkpoint(tmp_path)) is not is_tied
    assert_same_logits(oracle, tmp_path, 20)


# Families whose attention has biases where their configuration says so.
BIASED: dict[str, dict[str, Any]] = {
    "llama": {"mlp_bias": True},
    "qwen3": {},
    "gemma2": {},
    "gemma3": {},
    "smollm3": {"mlp_bias": True},
    "granite": {"mlp_bias": True},
    "olmo2": {},
}


@pytest.mark.parametrize("family", BIASED)
def test_biases_are_added_where_the_checkpoint_has_them(tmp_path, family) -> None:
    changes = {"attention_bias": True} | BIASED[family]
    oracle = save_tiny_model(family, tmp_path, **changes)
    names = [name for name, _ in oracle.named_parameters() if name.endswith("bias")]
    assert len(names) == 4 * (4 + 3 * ("mlp_bias" in changes))
    assert_same_logits(oracle, tmp_path, 20)


# Trained for 32 positions each.
STRETCHED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn as DeepSeek names it": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("kind", STRETCHED)
@pytest.mark.parametrize("family", [each for each in ARCHITECTURES if each != "phi3"])
def test_stretched_positions_hold_past_the_trained_length(tmp_path, family, kind) -> None:
    rope = {"rope_type": kind, "rope_theta": 1000.0} | STRETCHED[kind]
    changes: dict[str, Any] = {"num_hidden_layers": 2, "max_position_embeddings": 128}
    if kind == "dynamic":
        changes["max_position_embeddings"] = 32
    if family == "gemma3":
        local = {"rope_type": "default", "rope_theta": 50.0}
        changes["layer_types"] = ["sliding_attention", "full_attention"]
        changes["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    else:
        changes["rope_parameters"] = rope
    oracle = save_tiny_model(family, tmp_path, **changes)
    spec = decoder_spec(ModelConfig.from_dir(tmp_path))
    assert spec.ropes[0].kind == rope["rope_type"]
    (prompt,) = random_prompts(100)
    with torch.inference_mode():
        want = oracle(torch.tensor([prompt])).logits[0, -1]
    got = logits_of_chunks(tmp_path, prompt, [70, 30], max_positions=100)
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)


# Families with windows, and what switches them on.
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1},
    "gemma2": {},
    "gemma3": {},
    "phi3": {},
    "smollm3": {
        "use_sliding_window": True,
        "no_rope_layer_interval": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}


@pytest.mark.parametrize("window", [1, 12, 13, 14, 200])
@pytest.mark.parametrize("family", WINDOWED)
def test_a_window_cuts_where_it_ends_and_a_longer_one_does_not(tmp_path, family, window) -> None:
    """Shorter than the prompt of 13, as long, and longer."""
    oracle = save_tiny_model(family, tmp_path, sliding_window=window, **WINDOWED[family])
    windows = {
        layer.sliding_window for layer in decoder_spec(ModelConfig.from_dir(tmp_path)).layers
    }
    assert window in windows
    assert_same_logits(oracle, tmp_path, 13)
    if window == 12:
        # And while it moves along an answer.
        assert_same_logits(oracle, tmp_path, 45)
