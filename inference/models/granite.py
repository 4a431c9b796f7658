"""Granite: Llama with multipliers on embeddings, scores, residual additions and logits."""

from inference.config import ModelConfig
from inference.models.spec import DecoderSpec, llama_like


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    raw = config.raw
    return llama_like(
        config,
        embedding_scale=float(raw.get("embedding_multiplier", 1.0)),
        attention_scale=float(raw.get("attention_multiplier", 1.0)),
        residual_scale=float(raw.get("residual_multiplier", 1.0)),
        logits_scale=1.0 / float(raw.get("logits_scaling", 1.0)),
    )
