"""Gemma 2 and 3: norms before and after each block, weights stored around zero, scaled embeddings.

Gemma 2 bends scores and logits with a soft cap and alternates window and full attention. Gemma 3
norms each head instead, has a full layer in six, and rotates window layers on a base of their own.
"""

import math
from typing import Any

from inference.config import ModelConfig
from inference.models.spec import (
    DecoderSpec,
    LayerSpec,
    layer_types,
    layers_like,
    llama_like,
    rope_spec,
)

_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def gemma2_spec(config: ModelConfig) -> DecoderSpec:
    raw = config.raw
    return llama_like(
        config,
        **_common(config),
        layers=layers_like(
            config,
            sliding_window=raw.get("sliding_window", 4096),
            is_sliding=lambda layer: layer % 2 == 0,
        ),
        attention_soft_cap=raw.get("attn_logit_softcapping", 50.0),
        logits_soft_cap=raw.get("final_logit_softcapping", 30.0),
    )


def gemma3_spec(config: ModelConfig) -> DecoderSpec:
    raw = config.raw
    period = int(raw.get("sliding_window_pattern") or 6)
    types = layer_types(config) or [
        "sliding_attention" if (layer + 1) % period else "full_attention"
        for layer in range(config.num_layers)
    ]
    window = raw.get("sliding_window", 4096)
    by_type = raw.get("rope_parameters") or {}
    local = by_type.get("sliding_attention") or {
        "rope_theta": raw.get("rope_local_base_freq", 10_000.0)
    }
    return llama_like(
        config,
        **_common(config),
        qk_norm="head",
        layers=tuple(
            LayerSpec(sliding_window=window, rope=1) if kind == "sliding_attention" else LayerSpec()
            for kind in types
        ),
        ropes=(
            rope_spec(config, default_theta=1_000_000.0, parameters=by_type.get("full_attention")),
            rope_spec(config, parameters=local),
        ),
        attention_soft_cap=raw.get("attn_logit_softcapping"),
        logits_soft_cap=raw.get("final_logit_softcapping"),
    )


def _common(config: ModelConfig) -> dict[str, Any]:
    return {
        "norms": _NORMS,
        "norm_offset": 1.0,
        "embedding_scale": math.sqrt(config.hidden_size),
        "attention_scale": float(config.raw.get("query_pre_attn_scalar", 256)) ** -0.5,
        "activation": "gelu_tanh",
        # Their checkpoints leave the field out.
        "tie_word_embeddings": bool(config.raw.get("tie_word_embeddings", True)),
    }
