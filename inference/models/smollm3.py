"""SmolLM3: Llama whose every fourth layer has no positions."""

from inference.config import ModelConfig
from inference.models.spec import DecoderSpec, LayerSpec, layer_types, llama_like, rope_spec


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    raw = config.raw
    interval = int(raw.get("no_rope_layer_interval") or 4)
    has_rope = raw.get("no_rope_layers") or [  # 1 where a layer has positions, despite the name
        (layer + 1) % interval != 0 for layer in range(config.num_layers)
    ]
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    types = layer_types(config) or [
        "full_attention" if positions else "sliding_attention" for positions in has_rope
    ]
    return llama_like(
        config,
        layers=tuple(
            LayerSpec(
                rope=0 if positions else None,
                sliding_window=window if kind == "sliding_attention" else None,
            )
            for positions, kind in zip(has_rope, types, strict=True)
        ),
        ropes=(rope_spec(config, default_theta=2_000_000.0),),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", True)),
    )
