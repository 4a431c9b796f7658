"""GGUF files of every family, made from tiny models as the format's converters make them.

Names from the format's own library, rotary rows interleaved, offsets added to norms.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from tests.inference.gguf_files import byte_level_vocabulary, interleaved

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
    # Files of Mistral models call themselves llama, and have no window.
    "mistral": ("mistral-no-window", Arch.LLAMA, {}),
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
    "qwen2-tied": ("qwen2", Arch.QWEN2, {"tie_word_embeddings": True}),
    "phi3-no-window": ("phi3", Arch.PHI3, {"sliding_window": None}),
    "gemma2": (
        "gemma2",
        Arch.GEMMA2,
        {"query_pre_attn_scalar": 8, "tie_word_embeddings": True},
    ),
    "gemma3": ("gemma3", Arch.GEMMA3, _GEMMA3 | {"tie_word_embeddings": True}),
}
GGUF_VOCAB_SIZE = len(byte_level_vocabulary()[0])
_INTERLEAVED = (Arch.LLAMA, Arch.SMOLLM3, Arch.GRANITE)
WITH_NORM_OFFSET = (Arch.GEMMA2, Arch.GEMMA3)


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


def write_file(
    path: Path, arch: Arch, folder: Path, kind: gguf.GGMLQuantizationType | None = None
) -> None:
    """Matrices in `kind`, or all as they are; norms, biases and tables always in float32."""
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
        if arch in WITH_NORM_OFFSET and theirs.endswith("norm.weight"):
            values = values + np.float32(1.0)
        if kind is None or values.ndim < 2:
            writer.add_tensor(ours, np.ascontiguousarray(values))
        else:
            writer.add_tensor(ours, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
