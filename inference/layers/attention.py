"""Attention of one layer over its paged keys and values; the only caller of the attention op."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from inference.layers.linear import Linear
from inference.layers.norm import RMSNorm
from inference.models.spec import DecoderSpec, LayerSpec
from inference.runner.input_batch import InputBatch
from kernels.kv_cache_write import kv_cache_write
from kernels.paged_attention import paged_attention
from kernels.rotary_kv_write import rotary_kv_write


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's blocks: [num_blocks, block_size, num_kv_heads, head_dim] each; in 8 bits with a
    scale for each token's head."""

    key: Tensor
    value: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


class Attention(nn.Module):
    def __init__(
        self, spec: DecoderSpec, layer: LayerSpec, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.num_heads = spec.num_heads
        self.num_kv_heads = spec.num_kv_heads
        self.head_dim = spec.head_dim
        self.scale = spec.attention_scale
        self.sliding_window = layer.sliding_window
        self.soft_cap = spec.attention_soft_cap
        query_size = spec.num_heads * spec.head_dim
        kv_size = spec.num_kv_heads * spec.head_dim
        self.qkv_proj = Linear(
            spec.hidden_size,
            query_size,
            kv_size,
            kv_size,
            bias=spec.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.o_proj = Linear(
            query_size, spec.hidden_size, bias=spec.output_bias, dtype=dtype, device=device
        )
        self.qk_norm = spec.qk_norm
        if spec.qk_norm != "none":
            per_head = spec.qk_norm == "head"
            self.q_norm = RMSNorm(
                spec.head_dim if per_head else query_size,
                eps=spec.norm_eps,
                offset=spec.norm_offset,
                device=device,
            )
            self.k_norm = RMSNorm(
                spec.head_dim if per_head else kv_size,
                eps=spec.norm_eps,
                offset=spec.norm_offset,
                device=device,
            )

    def forward(
        self, hidden_states: Tensor, cos_sin: Tensor | None, batch: InputBatch, cache: LayerCache
    ) -> Tensor:
        """[num_tokens, hidden_size]; writes the new tokens' k and v into `cache` first."""
        num_tokens = hidden_states.shape[0]
        num_qk_heads = self.num_heads + self.num_kv_heads
        # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        heads = self.qkv_proj(hidden_states, few_rows=batch.only_decodes)
        heads = heads.view(num_tokens, -1, self.head_dim)
        value = heads[:, num_qk_heads:]
        query_key = heads[:, :num_qk_heads]
        if self.qk_norm != "none":
            query_key = self._normalise(query_key)
        if cos_sin is not None:
            query = rotary_kv_write(
                query_key,
                value,
                cos_sin,
                cache.key,
                cache.value,
                batch.slot_mapping,
                key_scales=cache.key_scales,
                value_scales=cache.value_scales,
            )
        else:
            query, key = query_key[:, : self.num_heads], query_key[:, self.num_heads :]
            kv_cache_write(
                key,
                value,
                cache.key,
                cache.value,
                batch.slot_mapping,
                key_scales=cache.key_scales,
                value_scales=cache.value_scales,
            )
        attended = paged_attention(
            query,
            cache.key,
            cache.value,
            batch.block_tables,
            batch.seq_lens,
            batch.query_start_loc,
            scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            num_decodes=batch.num_decodes,
            key_scales=cache.key_scales,
            value_scales=cache.value_scales,
        )
        output: Tensor = self.o_proj(attended.view(num_tokens, -1), few_rows=batch.only_decodes)
        return output

    def _normalise(self, query_key: Tensor) -> Tensor:
        query, key = query_key[:, : self.num_heads], query_key[:, self.num_heads :]
        if self.qk_norm == "all":  # over all heads of a token at once
            flat_query, flat_key = self.q_norm(query.flatten(1)), self.k_norm(key.flatten(1))
            return torch.cat([flat_query, flat_key], dim=1).view(query_key.shape)
        return torch.cat([self.q_norm(query), self.k_norm(key)], dim=1)
