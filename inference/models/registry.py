"""Architectures that can be served, by the name in a checkpoint's config.json. No torch."""

from collections.abc import Callable

from inference.config import ModelConfig
from inference.errors import ModelLoadError, UnsupportedArchitecture
from inference.models import gemma, granite, llama, mistral, olmo2, phi3, qwen, smollm3
from inference.models.spec import DecoderSpec

ARCHITECTURES: dict[str, Callable[[ModelConfig], DecoderSpec]] = {
    "Gemma2ForCausalLM": gemma.gemma2_spec,
    "Gemma3ForCausalLM": gemma.gemma3_spec,
    "GraniteForCausalLM": granite.decoder_spec,
    "LlamaForCausalLM": llama.decoder_spec,
    "MistralForCausalLM": mistral.decoder_spec,
    "Olmo2ForCausalLM": olmo2.decoder_spec,
    "Phi3ForCausalLM": phi3.decoder_spec,
    "Qwen2ForCausalLM": qwen.qwen2_spec,
    "Qwen3ForCausalLM": qwen.qwen3_spec,
    "SmolLM3ForCausalLM": smollm3.decoder_spec,
}


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    """The spec of a checkpoint.

    Raises:
        UnsupportedArchitecture: its architecture is not one of the above; the message lists them.
        ModelLoadError: a field of its configuration cannot be served.
    """
    make = ARCHITECTURES.get(config.architecture)
    if make is None:
        raise UnsupportedArchitecture(
            f"The model's architecture is {config.architecture!r}, which cannot be served. "
            f"Supported are {', '.join(ARCHITECTURES)}."
        )
    try:
        spec = make(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as exc:
        raise ModelLoadError(
            f"config.json does not describe a {config.architecture}: {type(exc).__name__} {exc}."
        ) from exc
    if len(spec.layers) != config.num_layers:
        raise ModelLoadError(
            f"config.json describes {len(spec.layers)} layers but counts {config.num_layers}."
        )
    return spec


def refuse_quantised(model_config: ModelConfig) -> None:
    """
    Raises:
        ModelLoadError: the checkpoint is stored in a quantised form.
    """
    stored = model_config.raw.get("quantization_config")
    if stored:
        method = stored.get("quant_method", "unknown") if isinstance(stored, dict) else "unknown"
        raise ModelLoadError(
            f"The model's weights are quantised ({method}), which cannot be read. Take the "
            "original weights, or a GGUF file of the model."
        )
