"""What a family of models looks like, in numbers and choices. No torch.

One decoder (`decoder.py`) builds itself from a `DecoderSpec`; a family's file says how a checkpoint
of that family maps to one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from inference.config import ModelConfig
from inference.errors import ModelLoadError

# Ours -> the checkpoint's. Which of the four norms a layer has is told by which are named.
PRE_NORMS: Mapping[str, str] = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding of the layers that name it."""

    theta: float
    # Leading dimensions of a head that are rotated; even.
    rotary_dim: int
    # default, linear, dynamic, llama3, yarn, longrope
    kind: str = "default"
    # Fields of that kind, by the checkpoint's names.
    parameters: Mapping[str, Any] = field(default_factory=dict)
    # The checkpoint's max_position_embeddings.
    max_position: int

    @property
    def longest(self) -> int:
        """Positions that this form reaches; the checkpoint may name fewer as its usual length."""
        factor = float(self.parameters.get("factor") or 1.0)
        if self.kind == "dynamic":
            return int(self.max_position * factor)
        if self.kind == "yarn":
            trained = self.parameters.get("original_max_position_embeddings") or self.max_position
            return max(self.max_position, int(int(trained) * factor))
        return self.max_position


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    # Tokens a token sees, itself included; None is all before it.
    sliding_window: int | None = None
    # Index into DecoderSpec.ropes; None gives the layer no positions.
    rope: int | None = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Shape and choices of a decoder-only model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    norm_eps: float
    tie_word_embeddings: bool
    # Multiplies q·k.
    attention_scale: float
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    # Norm of queries and keys before rotation: of each head, of all heads at once, or none.
    qk_norm: Literal["none", "head", "all"] = "none"
    norms: Mapping[str, str] = field(default_factory=lambda: PRE_NORMS)
    # Added to every norm's weight.
    norm_offset: float = 0.0
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    # Multipliers of embeddings, of what a block adds to the residual stream, and of the logits.
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0


def rope_spec(
    config: ModelConfig,
    *,
    default_theta: float = 10_000.0,
    parameters: Mapping[str, Any] | None = None,
) -> RopeSpec:
    """From the checkpoint's `rope_parameters`, or `rope_scaling` beside `rope_theta` as older
    checkpoints have it. `parameters` are those of one kind of layer, where kinds differ."""
    raw = config.raw
    fields = dict(parameters or raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = fields.get("rope_theta") or raw.get("rope_theta") or default_theta
    share = fields.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if "original_max_position_embeddings" not in fields:
        outside = raw.get("original_max_position_embeddings")
        if outside is not None:
            fields["original_max_position_embeddings"] = outside
    return RopeSpec(
        theta=float(theta),
        rotary_dim=int(config.head_dim * float(share)) // 2 * 2,
        kind=str(fields.get("rope_type") or fields.get("type") or "default"),
        parameters=fields,
        max_position=config.max_position,
    )


def layer_types(config: ModelConfig) -> list[str] | None:
    """The checkpoint's own list of `full_attention` and `sliding_attention`, if it has one."""
    types = config.raw.get("layer_types")
    return [str(kind) for kind in types] if types else None


def layers_like(
    config: ModelConfig, *, sliding_window: int | None, is_sliding: Callable[[int], bool]
) -> tuple[LayerSpec, ...]:
    """Layers of one rotation; those that the checkpoint's list, or else `is_sliding`, names see
    `sliding_window` tokens."""
    types = layer_types(config) or [
        "sliding_attention" if is_sliding(layer) else "full_attention"
        for layer in range(config.num_layers)
    ]
    return tuple(
        LayerSpec(sliding_window=sliding_window if kind == "sliding_attention" else None)
        for kind in types
    )


def llama_like(config: ModelConfig, **changes: Any) -> DecoderSpec:
    """The plain decoder of Llama's shape, with what a family does otherwise in `changes`."""
    bias = bool(config.raw.get("attention_bias", False))
    plain: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "layers": (LayerSpec(),) * config.num_layers,
        "norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_scale": config.head_dim**-0.5,
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bool(config.raw.get("mlp_bias", False)),
        "activation": _activation(config),
    }
    if "ropes" not in changes:
        plain["ropes"] = (rope_spec(config),)
    return DecoderSpec(**(plain | changes))


def _activation(config: ModelConfig) -> str:
    name = config.raw.get("hidden_activation") or config.raw.get("hidden_act") or "silu"
    found = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}.get(name)
    if found is None:
        raise ModelLoadError(
            f"The checkpoint's activation {name!r} is not supported; "
            "supported are silu and gelu_pytorch_tanh."
        )
    return found
