"""The one decoder that all families are built from; shapes and choices come from a `DecoderSpec`.

The readable forward pass: every device and dtype, and the oracle of faster ones.
"""

import torch
from torch import Tensor, nn

from inference.kv_cache.storage import KVCacheStorage
from inference.layers.attention import Attention, LayerCache
from inference.layers.embedding import Embedding
from inference.layers.linear import Linear
from inference.layers.mlp import GatedMLP
from inference.layers.norm import RMSNorm
from inference.layers.rotary import RotaryTable
from inference.models.spec import DecoderSpec, LayerSpec
from inference.runner.input_batch import InputBatch


class DecoderLayer(nn.Module):
    """Attention, then MLP; each normed before, after or both, and added to the residual stream."""

    def __init__(
        self, spec: DecoderSpec, layer: LayerSpec, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.residual_scale = spec.residual_scale
        self.attention = Attention(spec, layer, dtype=dtype, device=device)
        self.mlp = GatedMLP(
            spec.hidden_size,
            spec.intermediate_size,
            activation=spec.activation,
            bias=spec.mlp_bias,
            dtype=dtype,
            device=device,
        )

        def norm(name: str) -> nn.Module:
            if name not in spec.norms:
                return nn.Identity()
            return RMSNorm(
                spec.hidden_size, eps=spec.norm_eps, offset=spec.norm_offset, device=device
            )

        self.attention_norm = norm("attention_norm")
        self.attention_post_norm = norm("attention_post_norm")
        self.mlp_norm = norm("mlp_norm")
        self.mlp_post_norm = norm("mlp_post_norm")

    def forward(
        self,
        residual: Tensor,
        change: Tensor | None,
        cos_sin: Tensor | None,
        batch: InputBatch,
        cache: LayerCache,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream [num_tokens, hidden_size], and what this layer still adds to it.

        `change` is what the layer before still adds: it is added together with the next norm.
        """
        residual, normed = add_and_norm(residual, change, self.attention_norm, self.residual_scale)
        change = self.attention_post_norm(self.attention(normed, cos_sin, batch, cache))
        residual, normed = add_and_norm(residual, change, self.mlp_norm, self.residual_scale)
        return residual, self.mlp_post_norm(self.mlp(normed, few_rows=batch.only_decodes))


def add_and_norm(
    residual: Tensor, change: Tensor | None, norm: nn.Module, scale: float
) -> tuple[Tensor, Tensor]:
    """residual + change * scale, and its norm; a layer without that norm gets the sum itself."""
    if change is not None and isinstance(norm, RMSNorm):
        return norm.add(residual, change, scale)
    if change is not None:
        residual = residual + (change if scale == 1.0 else change * scale)
    return residual, norm(residual)


class Decoder(nn.Module):
    """Weights are uninitialised until a checkpoint is loaded into it; then call `prepare()`."""

    def __init__(
        self, spec: DecoderSpec, *, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = Embedding(
            spec.vocab_size,
            spec.hidden_size,
            scale=spec.embedding_scale,
            dtype=dtype,
            device=device,
        )
        self.layers = nn.ModuleList(
            DecoderLayer(spec, layer, dtype=dtype, device=device) for layer in spec.layers
        )
        self.ropes = nn.ModuleList(RotaryTable(rope, max_positions, device) for rope in spec.ropes)
        self.norm = RMSNorm(
            spec.hidden_size, eps=spec.norm_eps, offset=spec.norm_offset, device=device
        )
        self.lm_head = Linear(
            spec.hidden_size, spec.vocab_size, bias=False, dtype=dtype, device=device
        )
        if spec.tie_word_embeddings:
            self.lm_head.weight = self.embedding.weight

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and the calculation."""
        dtype: torch.dtype = self.embedding.weight.dtype
        return dtype

    @property
    def reads_groups(self) -> bool:
        """Whether any linear has quantised groups for few rows."""
        linears = (module for module in self.modules() if isinstance(module, Linear))
        return any(linear.groups for linear in linears)

    def prepare(self) -> None:
        """Called once, after loading."""
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.prepare()

    def forward(self, batch: InputBatch, storage: KVCacheStorage) -> Tensor:
        """[num_samples, vocab_size] fp32; only rows that sample pay for the vocabulary."""
        residual = self.embedding(batch.input_ids)  # [num_tokens, hidden_size]
        change: Tensor | None = None
        angles = [rope(batch.positions) for rope in self.ropes]
        for index, (layer, layer_spec) in enumerate(
            zip(self.layers, self.spec.layers, strict=True)
        ):
            cos_sin = None if layer_spec.rope is None else angles[layer_spec.rope]
            cache = _layer_cache(storage, index)
            residual, change = layer(residual, change, cos_sin, batch, cache)
        sampled = batch.logits_indices
        last = None if change is None else change[sampled]
        _, normed = add_and_norm(residual[sampled], last, self.norm, self.spec.residual_scale)
        logits: Tensor = self.lm_head(normed, few_rows=True).float()
        if self.spec.logits_scale != 1.0:
            logits = logits * self.spec.logits_scale
        if self.spec.logits_soft_cap is not None:
            logits = torch.tanh(logits / self.spec.logits_soft_cap) * self.spec.logits_soft_cap
        return logits


def _layer_cache(storage: KVCacheStorage, index: int) -> LayerCache:
    scales = storage.key_scales, storage.value_scales
    return LayerCache(
        storage.key_cache[index],
        storage.value_cache[index],
        *(each if each is None else each[index] for each in scales),
    )
