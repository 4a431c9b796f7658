"""One-time import of a GGUF file into a model folder that the engine loads in a second. No torch.

The folder holds config.json, generation_config.json, the tokenizer's files, chat_template.jinja,
model.safetensors (bfloat16) and, where the file has matrices in groups of 32, their exact groups in
quantized.safetensors for the CPU kernels. It appears whole or not at all.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from inference.errors import ModelLoadError, UnsupportedArchitecture
from inference.weights.gguf_dequantize import (
    dequantize,
    to_bfloat16_bits,
    to_quant_groups,
)
from inference.weights.gguf_reader import GGML_TYPES, GGUFFile, GGUFTensor, read_gguf
from inference.weights.gguf_tokenizer import build_tokenizer
from inference.weights.safetensors_writer import TensorPlan, write_safetensors

GROUPS_FORMAT = "blockhouse-groups-32-v1"
# Elements decoded at a time: fits the processor's cache, bounds memory.
_CHUNK_ELEMENTS = 1 << 20

Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class _Family:
    """How one GGUF architecture maps to a checkpoint's class and names."""

    architecture: str
    model_type: str
    # Query and key rows are stored with the two halves of each head interleaved.
    permutes_rope: bool
    extra_names: tuple[tuple[str, str], ...] = ()


_QKV_BIAS = tuple((f"attn_{letter}.bias", f"self_attn.{letter}_proj.bias") for letter in "qkv")
_QK_NORM = tuple(
    (f"attn_{letter}_norm.weight", f"self_attn.{letter}_norm.weight") for letter in "qk"
)
_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", "llama", True),
    "qwen2": _Family("Qwen2ForCausalLM", "qwen2", False, _QKV_BIAS),
    "qwen3": _Family("Qwen3ForCausalLM", "qwen3", False, _QK_NORM),
}
_LAYER_NAMES = (
    ("attn_norm.weight", "input_layernorm.weight"),
    ("ffn_norm.weight", "post_attention_layernorm.weight"),
    ("attn_q.weight", "self_attn.q_proj.weight"),
    ("attn_k.weight", "self_attn.k_proj.weight"),
    ("attn_v.weight", "self_attn.v_proj.weight"),
    ("attn_output.weight", "self_attn.o_proj.weight"),
    ("ffn_gate.weight", "mlp.gate_proj.weight"),
    ("ffn_up.weight", "mlp.up_proj.weight"),
    ("ffn_down.weight", "mlp.down_proj.weight"),
)
# End-of-turn tokens that files mark as control without naming them in their metadata.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")


def import_gguf(
    gguf_path: Path, target_dir: Path, on_progress: Progress = lambda share, what: None
) -> None:
    """Write `target_dir` from a GGUF file; an existing folder of that name is replaced.

    `on_progress` gets a share in [0, 1] and what is being done.

    Raises:
        ModelLoadError: the file is broken, hostile or of an unsupported kind, or the disk is full.
            Nothing is left behind.
    """
    on_progress(0.0, "reading the file")
    gguf = read_gguf(gguf_path)
    target_dir.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target_dir.name}-", dir=target_dir.parent))
    try:
        temporary.chmod(0o755)
        _write_folder(gguf, temporary, on_progress)
        replace_folder(temporary, target_dir)
    except OSError as exc:
        raise ModelLoadError(f"{target_dir} cannot be written: {exc.strerror or exc}.") from exc
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    on_progress(1.0, "done")


def replace_folder(source: Path, target: Path) -> None:
    """Rename `source` to `target`; what stood there is removed afterwards."""
    if not target.exists():
        os.rename(source, target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
    os.rename(target, old / "folder")
    os.rename(source, target)
    shutil.rmtree(old, ignore_errors=True)


def _write_folder(gguf: GGUFFile, folder: Path, on_progress: Progress) -> None:
    family = _family(gguf)
    tensors = _hf_tensors(gguf, family)
    config = _config(gguf, family, tensors)
    tokenizer, tokenizer_config = build_tokenizer(gguf.metadata)
    tokenizer_config["model_max_length"] = config["max_position_embeddings"]
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(config))
    _write_json(folder / "tokenizer.json", tokenizer)
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    template = gguf.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_weights(tensors, folder, on_progress)


def _write_weights(tensors: dict[str, GGUFTensor], folder: Path, on_progress: Progress) -> None:
    total = sum(2 * math.prod(tensor.shape) for tensor in tensors.values())
    written = 0

    def on_tensor(num_bytes: int) -> None:
        nonlocal written
        written += num_bytes
        on_progress(0.9 * written / total, "unpacking weights")

    weights = [_bfloat16_plan(name, tensor) for name, tensor in tensors.items()]
    write_safetensors(folder / "model.safetensors", weights, {"format": "pt"}, on_tensor)
    on_progress(0.9, "writing the compact weights")
    groups = [plan for name, tensor in tensors.items() for plan in _group_plans(name, tensor)]
    if groups:
        write_safetensors(folder / "quantized.safetensors", groups, {"format": GROUPS_FORMAT})


def _family(gguf: GGUFFile) -> _Family:
    name = gguf.metadata.get("general.architecture")
    if name not in _FAMILIES:
        raise UnsupportedArchitecture(
            f"{gguf.path} holds a model of the kind {name!r}; GGUF import knows "
            f"{', '.join(_FAMILIES)}."
        )
    return _FAMILIES[name]


def _hf_tensors(gguf: GGUFFile, family: _Family) -> dict[str, GGUFTensor]:
    """Every tensor under its checkpoint name, query and key rows in checkpoint order."""
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    for layer in range(_positive(gguf, "block_count", 512)):
        for ours, theirs in (*_LAYER_NAMES, *family.extra_names):
            names[f"blk.{layer}.{ours}"] = f"model.layers.{layer}.{theirs}"
    missing = [name for name in names if name not in gguf.tensors and name != "output.weight"]
    # Computed from the configuration instead; checked there.
    unknown = [name for name in gguf.tensors if name not in names and name != "rope_freqs.weight"]
    for problem, found in (("lacks", missing), ("has unknown", unknown)):
        if found:
            listed = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
            raise ModelLoadError(f"{gguf.path} {problem} {len(found)} tensors: {listed}.")
    heads = _positive(gguf, "attention.head_count", 1024)
    kv_heads = _positive(gguf, "attention.head_count_kv", 1024, heads)
    tensors = {}
    for ours, theirs in names.items():
        if ours not in gguf.tensors:
            continue
        tensor = gguf.tensors[ours]
        if family.permutes_rope and ".attn_q." in ours:
            tensor = _unpermuted(tensor, heads)
        elif family.permutes_rope and ".attn_k." in ours:
            tensor = _unpermuted(tensor, kv_heads)
        tensors[theirs] = tensor
    return tensors


def _unpermuted(tensor: GGUFTensor, num_heads: int) -> GGUFTensor:
    """Undo the interleaving of each head's two halves; moves whole rows, still encoded."""
    rows = tensor.shape[0]
    if rows % (2 * num_heads):
        raise ModelLoadError(f"{tensor.name} has {rows} rows for {num_heads} heads.")
    order = np.arange(rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
    data = tensor.data.reshape(rows, -1)[order].reshape(-1)
    return GGUFTensor(tensor.name, tensor.type_name, tensor.shape, data)


def _bfloat16_plan(name: str, tensor: GGUFTensor) -> TensorPlan:
    block_elements, block_bytes = next(
        (elements, size) for kind, elements, size in GGML_TYPES.values() if kind == tensor.type_name
    )
    step = _CHUNK_ELEMENTS // block_elements * block_bytes

    def chunks() -> Iterator[npt.NDArray[np.uint16]]:
        for start in range(0, len(tensor.data), step):
            piece = tensor.data[start : start + step]
            yield to_bfloat16_bits(dequantize(tensor.type_name, piece))

    return TensorPlan(name, "BF16", tensor.shape, chunks)


def _group_plans(name: str, tensor: GGUFTensor) -> Iterator[TensorPlan]:
    groups = to_quant_groups(tensor.type_name, tensor.data, tensor.shape)
    if groups is None:
        return
    stem = name.removesuffix(".weight")
    parts: Iterable[tuple[str, str, npt.NDArray[Any] | None]] = (
        ("quants", "U8", groups.quants),
        ("scales", "F16", groups.scales),
        ("mins", "F16", groups.mins),
    )
    for part, dtype, values in parts:
        if values is not None:
            yield TensorPlan(f"{stem}.{part}", dtype, values.shape, partial(_whole, values))


def _whole(values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    return [values]


def _positive(gguf: GGUFFile, key: str, limit: int, default: int | None = None) -> int:
    full = f"{gguf.metadata['general.architecture']}.{key}"
    got = gguf.metadata.get(full, default)
    if isinstance(got, bool) or not isinstance(got, int) or not 1 <= got <= limit:
        raise ModelLoadError(f"{gguf.path}: {full} is {got!r}; 1 to {limit:,} is allowed.")
    return got


def _config(gguf: GGUFFile, family: _Family, tensors: dict[str, GGUFTensor]) -> dict[str, Any]:
    metadata = gguf.metadata
    prefix = metadata["general.architecture"]
    heads = _positive(gguf, "attention.head_count", 1024)
    hidden = _positive(gguf, "embedding_length", 65_536)
    head_dim = _positive(gguf, "attention.key_length", 1024, hidden // heads)
    embedding = tensors["model.embed_tokens.weight"]
    if embedding.shape[-1] != hidden or len(embedding.shape) != 2:
        raise ModelLoadError(f"{gguf.path}: the embedding has the shape {embedding.shape}.")
    if len(metadata.get("tokenizer.ggml.tokens", ())) > embedding.shape[0]:
        raise ModelLoadError(f"{gguf.path}: the vocabulary is larger than the embedding.")
    rope = _rope_parameters(gguf, head_dim)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": _positive(gguf, "feed_forward_length", 1_000_000),
        "num_hidden_layers": _positive(gguf, "block_count", 512),
        "num_attention_heads": heads,
        "num_key_value_heads": _positive(gguf, "attention.head_count_kv", 1024, heads),
        "head_dim": head_dim,
        "max_position_embeddings": _positive(gguf, "context_length", 100_000_000),
        "rms_norm_eps": _short(metadata.get(f"{prefix}.attention.layer_norm_rms_epsilon", 1e-5)),
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_ids(metadata),
        "dtype": "bfloat16",
    }


def _short(value: float) -> float:
    """The shortest decimal that is the same 32-bit float: 1e-05 for 9.99999974e-06."""
    return float(str(np.float32(value)))


def _rope_parameters(gguf: GGUFFile, head_dim: int) -> dict[str, Any]:
    prefix = gguf.metadata["general.architecture"]
    theta = _short(gguf.metadata.get(f"{prefix}.rope.freq_base", 10000.0))
    rotated = gguf.metadata.get(f"{prefix}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelLoadError(f"{gguf.path}: only {rotated} of {head_dim} dimensions are rotated.")
    kind = gguf.metadata.get(f"{prefix}.rope.scaling.type", "none")
    factor = gguf.metadata.get(f"{prefix}.rope.scaling.factor", 1.0)
    original = gguf.metadata.get(f"{prefix}.rope.scaling.original_context_length")
    if "rope_freqs.weight" in gguf.tensors:
        return _llama3_rope(gguf, theta, head_dim)
    if kind == "none" or factor in (0.0, 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise ModelLoadError(f"{gguf.path}: position scaling {kind!r} is not supported.")
    rope = {"rope_type": kind, "rope_theta": theta, "factor": _short(factor)}
    if original:
        rope["original_max_position_embeddings"] = original
    return rope


def _llama3_rope(gguf: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Recover the parameters that the stored frequency divisors were made from, and check them."""
    stored = dequantize("F32", gguf.tensors["rope_freqs.weight"].data)
    low, high, original = 1.0, 4.0, 8192
    factor = _short(float(stored.max()))
    waves = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = np.clip((original / waves - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - blend) / factor + blend)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise ModelLoadError(f"{gguf.path}: its table of position frequencies is not known.")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _eos_ids(metadata: dict[str, Any]) -> list[int]:
    found = []
    for name in ("eos", "eot", "eom"):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token_id, int):
            found.append(token_id)
    types = metadata.get("tokenizer.ggml.token_type", [])
    for token_id, token in enumerate(metadata.get("tokenizer.ggml.tokens", [])):
        if token in _END_OF_TURN and types[token_id] == 3:
            found.append(token_id)
    return list(dict.fromkeys(found))


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("bos_token_id", "eos_token_id")}


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
