"""Names: our parameters -> the checkpoint's tensors, which may be several stacked into one."""

import re

from inference.models.spec import DecoderSpec

_FIXED = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")


def checkpoint_names(spec: DecoderSpec, parameter: str, *, stacked: bool) -> tuple[str, ...]:
    """The checkpoint tensors that make up one of our parameters, in row order.

    Args:
        parameter: as `Decoder.named_parameters()` has it.
        stacked: the checkpoint holds stacked projections as one tensor already.
    """
    if parameter in _FIXED:
        return (_FIXED[parameter],)
    found = _IN_LAYER.fullmatch(parameter)
    assert found, f"{parameter} is no parameter of the decoder"
    layer, module, kind = found.groups()
    parent = f"model.layers.{layer}"
    if module in spec.norms:
        return (f"{parent}.{spec.norms[module]}.{kind}",)
    block, _, leaf = module.partition(".")
    block = {"attention": "self_attn", "mlp": "mlp"}[block]
    leaves = (leaf,) if stacked else _STACKED.get(leaf, (leaf,))
    return tuple(f"{parent}.{block}.{name}.{kind}" for name in leaves)
