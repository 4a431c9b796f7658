"""Llama 2 and 3, SmolLM 1 and 2, and whatever calls itself `LlamaForCausalLM`."""

from inference.config import ModelConfig
from inference.models.spec import DecoderSpec, llama_like


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    return llama_like(config)
