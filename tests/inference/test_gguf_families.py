"""Every GGUF family comes back as the checkpoint that it was made from.

The files are written as the format's converters write them: names from the format's own library,
rotary rows interleaved, offsets added to norms. The oracle is the original folder: same weights,
and the same decoder as the engine reads it.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from inference.config import ModelConfig
from inference.errors import ModelLoadError
from inference.models.registry import ARCHITECTURES, decoder_spec
from inference.models.spec import DecoderSpec
from inference.weights.gguf_families import FAMILIES
from inference.weights.gguf_import import import_gguf
from tests.inference.gguf_files import byte_level_vocabulary, interleaved
from tests.inference.tiny_models import save_tiny_model

Arch = gguf.MODEL_ARCH
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.25, 1.5],
    "long_factor": [1.5, 3.0, 6.0],
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.75,
}
_GEMMA3 = {
    "num_hidden_layers": 6,
    "query_pre_attn_scalar": 8,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
# name -> (tiny model, architecture of the file, changes to the tiny model)
CASES: dict[str, tuple[str, Arch, dict[str, Any]]] = {
    "llama": ("llama", Arch.LLAMA, {}),
    "llama-linear": ("llama-linear", Arch.LLAMA, {}),
    "llama-yarn": (
        "llama",
        Arch.LLAMA,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-llama3": (
        "llama",
        Arch.LLAMA,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
    ),
    "qwen2": ("qwen2", Arch.QWEN2, {}),
    "qwen3": ("qwen3", Arch.QWEN3, {"tie_word_embeddings": True}),
    "smollm3": ("smollm3", Arch.SMOLLM3, {"no_rope_layer_interval": 4}),
    "granite": ("granite", Arch.GRANITE, {}),
    "olmo2": ("olmo2", Arch.OLMO2, {}),
    "phi3": ("phi3", Arch.PHI3, {}),
    "phi3-longrope": (
        "phi3",
        Arch.PHI3,
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 16},
    ),
    "gemma2": (
        "gemma2",
        Arch.GEMMA2,
        {"query_pre_attn_scalar": 8, "tie_word_embeddings": True},
    ),
    "gemma3": ("gemma3", Arch.GEMMA3, _GEMMA3 | {"tie_word_embeddings": True}),
}
_VOCAB_SIZE = len(byte_level_vocabulary()[0])
_INTERLEAVED = (Arch.LLAMA, Arch.SMOLLM3, Arch.GRANITE)
_WITH_NORM_OFFSET = (Arch.GEMMA2, Arch.GEMMA3)


def write_rope(writer: gguf.GGUFWriter, rope: dict[str, Any], head_dim: int) -> None:
    kind = rope.get("rope_type", "default")
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope and kind != "llama3":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        for name in ("long", "short"):
            factors = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_dim))


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """One frequency at a time, as a converter does."""
    divisors = []
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low_wave = original / rope["low_freq_factor"]
    high_wave = original / rope["high_freq_factor"]
    for pair in range(head_dim // 2):
        wave = 2 * np.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        if wave < high_wave:
            divisors.append(1.0)
        elif wave > low_wave:
            divisors.append(factor)
        else:
            smooth = (original / wave - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def write_metadata(writer: gguf.GGUFWriter, arch: Arch, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config.get("head_dim") or 8)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    ropes = config["rope_parameters"]
    write_rope(writer, ropes.get("full_attention", ropes), config.get("head_dim") or 8)
    if config.get("sliding_window") and arch in (Arch.PHI3, Arch.GEMMA2, Arch.GEMMA3):
        writer.add_sliding_window(config["sliding_window"])
    if arch is Arch.GEMMA2:
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch is Arch.GRANITE:
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    tokens, merges = byte_level_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write_file(path: Path, arch: Arch, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    write_metadata(writer, arch, config)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for theirs, tensor in load_file(folder / "model.safetensors").items():
        ours = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert ours is not None, theirs
        values = tensor.float().numpy()
        if arch in _INTERLEAVED and (".q_proj." in theirs or ".k_proj." in theirs):
            of = "num_attention_heads" if ".q_proj." in theirs else "num_key_value_heads"
            values = interleaved(values, config[of])
        if arch in _WITH_NORM_OFFSET and theirs.endswith("norm.weight"):
            values = values + np.float32(1.0)
        writer.add_tensor(ours, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def comparable(spec: DecoderSpec) -> DecoderSpec:
    """Without those fields of a rotation that its kind does not use."""
    used = ("factor", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor")
    ropes = []
    for rope in spec.ropes:
        names = used if rope.kind != "default" else ()
        if rope.kind != "linear":
            names = (*names, "original_max_position_embeddings") if names else ()
        kept = {name: rope.parameters[name] for name in names if name in rope.parameters}
        ropes.append(dataclasses.replace(rope, parameters=kept))
    return dataclasses.replace(spec, ropes=tuple(ropes))


def test_every_served_architecture_but_one_is_imported() -> None:
    # Files of Mistral models call themselves llama.
    imported = {family.architecture for family in FAMILIES.values()}
    assert imported | {"MistralForCausalLM"} == set(ARCHITECTURES)
    assert {gguf.MODEL_ARCH_NAMES[arch] for _, arch, _ in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("case", CASES)
def test_a_family_comes_back_as_it_was(case: str, tmp_path: Path) -> None:
    family, arch, changes = CASES[case]
    original, imported = tmp_path / "original", tmp_path / "imported"
    save_tiny_model(family, original, vocab_size=_VOCAB_SIZE, **changes)
    write_file(tmp_path / "model.gguf", arch, original)
    import_gguf(tmp_path / "model.gguf", imported)

    before, after = (
        load_file(original / "model.safetensors"),
        load_file(imported / "model.safetensors"),
    )
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        # Adding and taking away a norm's 1 in float32 may move the last bit.
        torch.testing.assert_close(
            after[name].float(), tensor.bfloat16().float(), rtol=0.01, atol=1e-6
        )
        if arch not in _WITH_NORM_OFFSET:
            assert torch.equal(after[name], tensor.bfloat16()), name
    specs = [
        comparable(decoder_spec(ModelConfig.from_dir(folder))) for folder in (original, imported)
    ]
    assert specs[1] == specs[0]


def test_the_largest_gemmas_scale_scores_by_a_heads_share(tmp_path: Path) -> None:
    original = tmp_path / "original"
    save_tiny_model(
        "gemma2",
        original,
        vocab_size=_VOCAB_SIZE,
        num_hidden_layers=46,
        num_attention_heads=3,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    write_file(tmp_path / "model.gguf", Arch.GEMMA2, original)
    import_gguf(tmp_path / "model.gguf", tmp_path / "imported")
    config = json.loads((tmp_path / "imported" / "config.json").read_text())
    assert config["query_pre_attn_scalar"] == 16


def test_an_unknown_table_of_frequencies_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, arch, changes = CASES["llama-llama3"]
    save_tiny_model(family, tmp_path / "original", vocab_size=_VOCAB_SIZE, **changes)
    monkeypatch.setitem(
        globals(), "llama3_divisors", lambda rope, dim: np.array([1, 2, 3, 4], np.float32)
    )
    write_file(tmp_path / "model.gguf", arch, tmp_path / "original")
    with pytest.raises(ModelLoadError, match="position frequencies"):
        import_gguf(tmp_path / "model.gguf", tmp_path / "imported")
