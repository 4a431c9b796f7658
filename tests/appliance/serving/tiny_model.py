"""A model folder that loads at once: random weights, byte-level tokenizer. Needs no torch."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from inference.weights.gguf_tokenizer import build_tokenizer
from tests.inference.chat_templates import CHATML
from tests.inference.text_models import byte_level_metadata

_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS = 64, 128, 2, 4, 2


def save_tiny_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    metadata = byte_level_metadata()
    document, tokenizer_config = build_tokenizer(metadata)
    vocab_size = len(metadata["tokenizer.ggml.tokens"])
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "chat_template.jinja").write_text(CHATML)
    save_file(_weights(vocab_size), folder / "model.safetensors")
    return folder


def _weights(vocab_size: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (0.2 * random.standard_normal((rows, columns))).astype(np.float32)

    head = _HIDDEN // _HEADS
    weights = {
        "model.embed_tokens.weight": matrix(vocab_size, _HIDDEN),
        "model.norm.weight": np.ones(_HIDDEN, np.float32),
    }
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.self_attn.q_proj.weight": matrix(_HEADS * head, _HIDDEN),
            f"{name}.self_attn.k_proj.weight": matrix(_KV_HEADS * head, _HIDDEN),
            f"{name}.self_attn.v_proj.weight": matrix(_KV_HEADS * head, _HIDDEN),
            f"{name}.self_attn.o_proj.weight": matrix(_HIDDEN, _HEADS * head),
            f"{name}.mlp.gate_proj.weight": matrix(_INNER, _HIDDEN),
            f"{name}.mlp.up_proj.weight": matrix(_INNER, _HIDDEN),
            f"{name}.mlp.down_proj.weight": matrix(_HIDDEN, _INNER),
            f"{name}.input_layernorm.weight": np.ones(_HIDDEN, np.float32),
            f"{name}.post_attention_layernorm.weight": np.ones(_HIDDEN, np.float32),
        }
    return weights
