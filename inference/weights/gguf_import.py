"""One-time import of a GGUF file into a model folder that the engine loads in a second. No torch.

The folder holds config.json, generation_config.json, the tokenizer's files, chat_template.jinja,
model.safetensors (bfloat16) and, where the file has quantised matrices, their exact groups or
blocks in quantized.safetensors for the CPU kernels. It appears whole or not at all.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from inference.errors import ModelLoadError, UnsupportedArchitecture
from inference.weights.gguf_dequantize import (
    SUPER_BLOCK_TYPES,
    dequantize,
    to_bfloat16_bits,
    to_quant_groups,
)
from inference.weights.gguf_families import FAMILIES, Family, Metadata
from inference.weights.gguf_reader import GGML_TYPES, GGUFFile, GGUFTensor, read_gguf
from inference.weights.gguf_tokenizer import build_tokenizer
from inference.weights.header import GROUPS_FILE, GROUPS_FORMAT
from inference.weights.safetensors_writer import TensorPlan, write_safetensors

# Elements decoded at a time: fits the processor's cache, bounds memory.
_CHUNK_ELEMENTS = 1 << 20

Progress = Callable[[float, str], None]


# They are written into the configuration, and checked there.
_ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
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
    _write_weights(tensors, family.norm_offset, folder, on_progress)


def _write_weights(
    tensors: dict[str, GGUFTensor], norm_offset: float, folder: Path, on_progress: Progress
) -> None:
    total = sum(2 * math.prod(tensor.shape) for tensor in tensors.values())
    written = 0

    def on_tensor(num_bytes: int) -> None:
        nonlocal written
        written += num_bytes
        on_progress(0.9 * written / total, "unpacking weights")

    weights = [_bfloat16_plan(name, tensor, norm_offset) for name, tensor in tensors.items()]
    write_safetensors(folder / "model.safetensors", weights, {"format": "pt"}, on_tensor)
    on_progress(0.9, "writing the compact weights")
    groups = [plan for name, tensor in tensors.items() for plan in _group_plans(name, tensor)]
    if groups:
        write_safetensors(folder / GROUPS_FILE, groups, {"format": GROUPS_FORMAT})


def _family(gguf: GGUFFile) -> Family:
    name = str(gguf.metadata.get("general.architecture"))
    if name not in FAMILIES:
        raise UnsupportedArchitecture(
            f"{gguf.path} holds a model of the kind {name!r}; GGUF import knows "
            f"{', '.join(FAMILIES)}."
        )
    return FAMILIES[name]


def _hf_tensors(gguf: GGUFFile, family: Family) -> dict[str, GGUFTensor]:
    """Every tensor under its checkpoint name, query and key rows in checkpoint order."""
    metadata = Metadata(gguf)
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    for layer in range(metadata.whole("block_count", 512)):
        for ours, theirs in family.layer_names:
            names[f"blk.{layer}.{ours}"] = f"model.layers.{layer}.{theirs}"
    missing = [name for name in names if name not in gguf.tensors and name != "output.weight"]
    unknown = [name for name in gguf.tensors if name not in names and name not in _ROPE_TABLES]
    for problem, found in (("lacks", missing), ("has unknown", unknown)):
        if found:
            listed = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
            raise ModelLoadError(f"{gguf.path} {problem} {len(found)} tensors: {listed}.")
    heads = metadata.whole("attention.head_count", 1024)
    kv_heads = metadata.whole("attention.head_count_kv", 1024, heads)
    tensors = {}
    for ours, theirs in names.items():
        if ours not in gguf.tensors:
            continue
        tensor = gguf.tensors[ours]
        if family.interleaves_rope and ".attn_q." in ours:
            tensor = _unpermuted(tensor, heads)
        elif family.interleaves_rope and ".attn_k." in ours:
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


def _bfloat16_plan(name: str, tensor: GGUFTensor, norm_offset: float) -> TensorPlan:
    block_elements, block_bytes = next(
        (elements, size) for kind, elements, size in GGML_TYPES.values() if kind == tensor.type_name
    )
    offset = norm_offset if name.endswith("norm.weight") else 0.0
    step = _CHUNK_ELEMENTS // block_elements * block_bytes

    def chunks() -> Iterator[npt.NDArray[np.uint16]]:
        for start in range(0, len(tensor.data), step):
            values = dequantize(tensor.type_name, tensor.data[start : start + step])
            yield to_bfloat16_bits(values - np.float32(offset) if offset else values)

    return TensorPlan(name, "BF16", tensor.shape, chunks)


def _group_plans(name: str, tensor: GGUFTensor) -> Iterator[TensorPlan]:
    stem = name.removesuffix(".weight")
    if tensor.type_name in SUPER_BLOCK_TYPES and len(tensor.shape) == 2:
        blocks = tensor.data.reshape(tensor.shape[0], -1)
        yield TensorPlan(
            f"{stem}.{tensor.type_name.lower()}", "U8", blocks.shape, partial(_whole, blocks)
        )
        return
    groups = to_quant_groups(tensor.type_name, tensor.data, tensor.shape)
    if groups is None:
        return
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


def _config(gguf: GGUFFile, family: Family, tensors: dict[str, GGUFTensor]) -> dict[str, Any]:
    metadata = Metadata(gguf)
    heads = metadata.whole("attention.head_count", 1024)
    hidden = metadata.whole("embedding_length", 65_536)
    embedding = tensors["model.embed_tokens.weight"]
    if embedding.shape[-1] != hidden or len(embedding.shape) != 2:
        raise metadata.refusal(f"the embedding has the shape {embedding.shape}")
    if len(gguf.metadata.get("tokenizer.ggml.tokens", ())) > embedding.shape[0]:
        raise metadata.refusal("the vocabulary is larger than the embedding")
    common = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.whole("feed_forward_length", 1_000_000),
        "num_hidden_layers": metadata.whole("block_count", 512),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.whole("attention.head_count_kv", 1024, heads),
        "head_dim": metadata.whole("attention.key_length", 1024, hidden // heads),
        "max_position_embeddings": metadata.whole("context_length", 100_000_000),
        "rms_norm_eps": metadata.real("attention.layer_norm_rms_epsilon", 1e-5),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": gguf.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_ids(gguf.metadata),
        "dtype": "bfloat16",
    }
    return common | family.fields(metadata, common, gguf.tensors)


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
