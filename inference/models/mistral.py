"""Mistral: Llama with a sliding window in every layer, where the checkpoint sets one."""

from inference.config import ModelConfig
from inference.models.spec import DecoderSpec, LayerSpec, llama_like


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    # A checkpoint without the field has the window of the first release.
    window = config.raw.get("sliding_window", 4096)
    return llama_like(config, layers=(LayerSpec(sliding_window=window),) * config.num_layers)
