"""OLMo 2: Llama normed after each block, not before it; q and k are normed over all heads."""

from inference.config import ModelConfig
from inference.models.spec import DecoderSpec, llama_like

_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    return llama_like(config, qk_norm="all", norms=_NORMS)
