"""GGUF architectures: the checkpoint class, tensor names and configuration of each. No torch.

A family's `fields` get the metadata below the architecture's prefix and what is common to all, and
return what its config.json has besides.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from inference.errors import ModelLoadError
from inference.weights.gguf_dequantize import dequantize
from inference.weights.gguf_reader import GGUFFile, GGUFTensor

Config = dict[str, Any]
Fields = Callable[["Metadata", Config, Mapping[str, GGUFTensor]], Config]

# A file names its tensors "blk.<layer>.<left>", a checkpoint "model.layers.<layer>.<right>".
_ATTENTION = (
    ("attn_q.weight", "self_attn.q_proj.weight"),
    ("attn_k.weight", "self_attn.k_proj.weight"),
    ("attn_v.weight", "self_attn.v_proj.weight"),
    ("attn_output.weight", "self_attn.o_proj.weight"),
)
_MLP = (
    ("ffn_gate.weight", "mlp.gate_proj.weight"),
    ("ffn_up.weight", "mlp.up_proj.weight"),
    ("ffn_down.weight", "mlp.down_proj.weight"),
)
_PRE_NORMS = (
    ("attn_norm.weight", "input_layernorm.weight"),
    ("ffn_norm.weight", "post_attention_layernorm.weight"),
)
_POST_NORMS = (
    ("post_attention_norm.weight", "post_attention_layernorm.weight"),
    ("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
)
_FOUR_NORMS = (
    ("attn_norm.weight", "input_layernorm.weight"),
    ("ffn_norm.weight", "pre_feedforward_layernorm.weight"),
    *_POST_NORMS,
)
_QK_NORMS = (
    ("attn_q_norm.weight", "self_attn.q_norm.weight"),
    ("attn_k_norm.weight", "self_attn.k_norm.weight"),
)
_QKV_BIAS = (
    ("attn_q.bias", "self_attn.q_proj.bias"),
    ("attn_k.bias", "self_attn.k_proj.bias"),
    ("attn_v.bias", "self_attn.v_proj.bias"),
)
_STACKED = (
    ("attn_qkv.weight", "self_attn.qkv_proj.weight"),
    ("attn_output.weight", "self_attn.o_proj.weight"),
    ("ffn_up.weight", "mlp.gate_up_proj.weight"),
    ("ffn_down.weight", "mlp.down_proj.weight"),
)


class Metadata:
    """A file's metadata below its architecture's prefix, checked as it is read."""

    def __init__(self, gguf: GGUFFile) -> None:
        self._gguf = gguf
        self._prefix = str(gguf.metadata.get("general.architecture"))

    def whole(self, key: str, limit: int, default: int | None = None) -> int:
        """A number from 1 to `limit`. Some files give one for each layer; all must be alike."""
        got = self._get(key)
        if isinstance(got, list) and len(set(got)) == 1:
            got = got[0]
        got = default if got is None else got
        if isinstance(got, bool) or not isinstance(got, int) or not 1 <= got <= limit:
            raise self.refusal(f"{self._prefix}.{key} is {got!r}; 1 to {limit:,} is allowed")
        return got

    def real(self, key: str, default: float) -> float:
        """The shortest decimal that is the same 32-bit float: 1e-05 for 9.99999974e-06."""
        got = self._get(key)
        got = default if got is None else got
        if isinstance(got, bool) or not isinstance(got, int | float) or not math.isfinite(got):
            raise self.refusal(f"{self._prefix}.{key} is {got!r}; a number is needed")
        return float(str(np.float32(got)))

    def text(self, key: str, default: str) -> str:
        return str(self._get(key) or default)

    def refusal(self, why: str) -> ModelLoadError:
        return ModelLoadError(f"{self._gguf.path} cannot be used: {why}.")

    def _get(self, key: str) -> Any:
        return self._gguf.metadata.get(f"{self._prefix}.{key}")


# ---- rotation


def _rope(metadata: Metadata, common: Config, tensors: Mapping[str, GGUFTensor]) -> Config:
    """`rope_parameters` of the families that rotate all layers alike."""
    theta = metadata.real("rope.freq_base", 10_000.0)
    head_dim = common["head_dim"]
    rotated = metadata.whole("rope.dimension_count", 1024, head_dim)
    rope: Config = {"rope_type": "default", "rope_theta": theta}
    kind, factor = (
        metadata.text("rope.scaling.type", "none"),
        metadata.real("rope.scaling.factor", 1),
    )
    if "rope_freqs.weight" in tensors:
        rope = _llama3_rope(metadata, theta, rotated, tensors["rope_freqs.weight"])
    elif "rope_factors_long.weight" in tensors:
        rope |= {
            "rope_type": "longrope",
            "short_factor": _floats(tensors["rope_factors_short.weight"]),
            "long_factor": _floats(tensors["rope_factors_long.weight"]),
            "original_max_position_embeddings": metadata.whole(
                "rope.scaling.original_context_length", 100_000_000
            ),
        }
    elif kind in ("linear", "yarn") and factor not in (0.0, 1.0):
        rope |= {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = metadata.whole(
                "rope.scaling.original_context_length", 100_000_000
            )
    elif kind not in ("none", "linear", "yarn"):
        raise metadata.refusal(f"position scaling {kind!r} is not supported")
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    return {"rope_theta": theta, "rope_parameters": rope}


def _llama3_rope(metadata: Metadata, theta: float, rotated: int, stored: GGUFTensor) -> Config:
    """Recover the parameters that the stored frequency divisors were made from, and check them."""
    divisors = np.array(_floats(stored))
    factor = float(str(np.float32(divisors.max())))
    low, high, original = 1.0, 4.0, 8192
    waves = 2 * math.pi * theta ** (np.arange(0, rotated, 2) / rotated)
    blend = np.clip((original / waves - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - blend) / factor + blend)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise metadata.refusal("its table of position frequencies is of an unknown kind")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _floats(tensor: GGUFTensor) -> list[float]:
    return [float(str(value)) for value in dequantize(tensor.type_name, tensor.data)]


# ---- what the families have besides


def _smollm3(metadata: Metadata, common: Config, tensors: Mapping[str, GGUFTensor]) -> Config:
    # The format does not store it: every fourth layer has no positions in every published model.
    interval = {"no_rope_layer_interval": 4, "use_sliding_window": False}
    return _rope(metadata, common, tensors) | interval


def _granite(metadata: Metadata, common: Config, tensors: Mapping[str, GGUFTensor]) -> Config:
    return _rope(metadata, common, tensors) | {
        "attention_multiplier": metadata.real("attention.scale", common["head_dim"] ** -0.5),
        "embedding_multiplier": metadata.real("embedding_scale", 1.0),
        "residual_multiplier": metadata.real("residual_scale", 1.0),
        "logits_scaling": metadata.real("logit_scale", 1.0),
    }


def _phi3(metadata: Metadata, common: Config, tensors: Mapping[str, GGUFTensor]) -> Config:
    fields = _rope(metadata, common, tensors)
    # 0 stands for no window.
    window = int(metadata.real("attention.sliding_window", 0.0))
    return fields | {
        "sliding_window": window if 0 < window < common["max_position_embeddings"] else None,
        "original_max_position_embeddings": fields["rope_parameters"].get(
            "original_max_position_embeddings", common["max_position_embeddings"]
        ),
    }


def _gemma(metadata: Metadata, common: Config, deepest_layers: int) -> Config:
    """What both have in common. The largest model scores by the width of a head's share."""
    is_largest = common["num_hidden_layers"] == deepest_layers
    share = common["hidden_size"] // common["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": share if is_largest else common["head_dim"],
        "sliding_window": metadata.whole("attention.sliding_window", 1_000_000, 4096),
    }


def _gemma2(metadata: Metadata, common: Config, tensors: Mapping[str, GGUFTensor]) -> Config:
    fields = _rope(metadata, common, tensors) | _gemma(metadata, common, deepest_layers=46)
    return fields | {
        "attn_logit_softcapping": metadata.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata, common: Config, tensors: Mapping[str, GGUFTensor]) -> Config:
    whole = _rope(metadata, common, tensors)
    local = {
        "rope_type": "default",
        "rope_theta": metadata.real("rope.freq_base_swa", 10_000.0),
    }
    ropes = {"full_attention": whole["rope_parameters"], "sliding_attention": local}
    types = [
        "sliding_attention" if (layer + 1) % 6 else "full_attention"
        for layer in range(common["num_hidden_layers"])
    ]
    return _gemma(metadata, common, deepest_layers=62) | {
        "rope_theta": whole["rope_theta"],
        "rope_parameters": ropes,
        "layer_types": types,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


@dataclass(frozen=True, slots=True)
class Family:
    """One GGUF architecture."""

    architecture: str
    model_type: str
    layer_names: tuple[tuple[str, str], ...]
    # Query and key rows are stored with the two halves of each head interleaved.
    interleaves_rope: bool = False
    # Added to every norm's weight when the file was made.
    norm_offset: float = 0.0
    fields: Fields = _rope


_LLAMA_LAYER = (*_PRE_NORMS, *_ATTENTION, *_MLP)
_GEMMA_LAYER = (*_FOUR_NORMS, *_ATTENTION, *_MLP)

FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", "llama", _LLAMA_LAYER, interleaves_rope=True),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", (*_LLAMA_LAYER, *_QKV_BIAS)),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", (*_LLAMA_LAYER, *_QK_NORMS)),
    "smollm3": Family(
        "SmolLM3ForCausalLM", "smollm3", _LLAMA_LAYER, interleaves_rope=True, fields=_smollm3
    ),
    "granite": Family(
        "GraniteForCausalLM", "granite", _LLAMA_LAYER, interleaves_rope=True, fields=_granite
    ),
    "olmo2": Family("Olmo2ForCausalLM", "olmo2", (*_POST_NORMS, *_QK_NORMS, *_ATTENTION, *_MLP)),
    "phi3": Family("Phi3ForCausalLM", "phi3", (*_PRE_NORMS, *_STACKED), fields=_phi3),
    "gemma2": Family("Gemma2ForCausalLM", "gemma2", _GEMMA_LAYER, norm_offset=1.0, fields=_gemma2),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        (*_GEMMA_LAYER, *_QK_NORMS),
        norm_offset=1.0,
        fields=_gemma3,
    ),
}
