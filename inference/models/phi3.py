"""Phi-3 and Phi-4-mini: Llama with stacked projections and, in the long versions, one stretch a
pair of dimensions."""

import dataclasses

from inference.config import ModelConfig
from inference.models.spec import DecoderSpec, LayerSpec, llama_like, rope_spec


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    rope = rope_spec(config)
    if rope.kind in ("su", "yarn"):  # its names before "longrope" was agreed on
        rope = dataclasses.replace(rope, kind="longrope")
    window = config.raw.get("sliding_window")
    return llama_like(
        config, ropes=(rope,), layers=(LayerSpec(sliding_window=window),) * config.num_layers
    )
