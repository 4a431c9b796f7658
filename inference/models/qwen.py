"""Qwen 2 and 2.5: Llama with a bias in q, k and v. Qwen 3: no bias, but a norm of each head."""

from inference.config import ModelConfig
from inference.models.spec import DecoderSpec, LayerSpec, layers_like, llama_like


def qwen2_spec(config: ModelConfig) -> DecoderSpec:
    return llama_like(config, qkv_bias=True, output_bias=False, layers=_layers(config))


def qwen3_spec(config: ModelConfig) -> DecoderSpec:
    return llama_like(config, qk_norm="head", layers=_layers(config))


def _layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    # The lower layers see everything, the upper ones a window, and only where it is switched on.
    raw = config.raw
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    first_sliding = int(raw.get("max_window_layers", 28))
    return layers_like(
        config, sliding_window=window, is_sliding=lambda layer: layer >= first_sliding
    )
