"""Attention over keys and values that lie in blocks, found through block tables."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.backends import Backend, choose, lazily
from kernels.checks import FLOATS, check_device, check_dtype, check_shape
from kernels.errors import KernelArgumentError
from kernels.int8_kv import check_caches, dequantise
from kernels.paged_attention import cpu, reference

_BACKENDS: dict[Backend, Callable[..., Tensor]] = {
    Backend.REFERENCE: reference.paged_attention,
    Backend.CPU: cpu.paged_attention,
    Backend.TRITON: lazily("kernels.paged_attention.triton_attention", "paged_attention"),
}


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    num_decodes: int | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Causal attention of this step's new tokens over their requests' paged KV cache.

    Args:
        query: [num_tokens, num_heads, head_dim] fp32/bf16/fp16; requests' tokens back to back.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous, read
            only, one dtype of the above. Query head h reads key-value head
            h // (num_heads / num_kv_heads).
        block_tables: [num_requests, max_blocks] int32; entries past a request's length are ignored.
        seq_lens: [num_requests] int32; context length including the new tokens.
        query_start_loc: [num_requests + 1] int32; prefix sums of new tokens.
        scale: multiplies q·k, usually head_dim ** -0.5.
        sliding_window: a token sees itself and the `sliding_window - 1` tokens before it.
        soft_cap: scores become soft_cap * tanh(score / soft_cap), before the causal mask.
        num_decodes: how many leading requests have exactly one new token, where the caller knows
            it; None asks the device, which waits for it.
        key_scales, value_scales: of int8 caches, [num_blocks, block_size, num_kv_heads] float32;
            see kernels.int8_kv.
        backend: which implementation; None takes the fastest for the device.

    Returns:
        [num_tokens, num_heads, head_dim], query's dtype; accumulated in fp32.

    Raises:
        KernelArgumentError: a shape, dtype, device or layout is not as above.

    Paging: Kwon et al. 2023, arXiv:2309.06180. Grouped heads: arXiv:2305.13245.
    """
    _check(query, key_cache, value_cache, block_tables, seq_lens, query_start_loc)
    check_caches(key_cache, value_cache, key_scales, value_scales)
    if sliding_window is not None and sliding_window < 1:
        raise KernelArgumentError("sliding_window", sliding_window, "at least 1")
    if soft_cap is not None and soft_cap <= 0:
        raise KernelArgumentError("soft_cap", soft_cap, "above 0")
    if num_decodes is not None and not 0 <= num_decodes <= seq_lens.shape[0]:
        raise KernelArgumentError("num_decodes", num_decodes, f"0 to {seq_lens.shape[0]}")
    backend = backend or choose(query.device)
    scales = {}
    if key_scales is not None and value_scales is not None:
        if backend is Backend.TRITON:
            scales = {"key_scales": key_scales, "value_scales": value_scales}
        else:
            key_cache, value_cache, block_tables = _widened(
                query.dtype,
                (key_cache, key_scales),
                (value_cache, value_scales),
                block_tables,
                seq_lens,
            )
    return _BACKENDS[backend](
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        num_decodes=num_decodes,
        **scales,
    )


def _widened(
    dtype: torch.dtype,
    keys: tuple[Tensor, Tensor],
    values: tuple[Tensor, Tensor],
    block_tables: Tensor,
    seq_lens: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Copies in `dtype` of the blocks that requests read, and block tables over the copies."""
    block_size = keys[0].shape[1]
    first_tokens = torch.arange(block_tables.shape[1], device=seq_lens.device) * block_size
    is_read = first_tokens < seq_lens[:, None]
    blocks = block_tables[is_read].long()
    tables = torch.zeros_like(block_tables)
    tables[is_read] = torch.arange(len(blocks), dtype=torch.int32, device=blocks.device)
    wide = [dequantise(cache[blocks], scales[blocks]).to(dtype) for cache, scales in (keys, values)]
    return wide[0], wide[1], tables


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
) -> None:
    check_shape("query", query, None, None, None)
    check_shape("key_cache", key_cache, None, None, None, query.shape[2])
    check_shape("value_cache", value_cache, *key_cache.shape)
    check_shape("block_tables", block_tables, None, None)
    num_requests = block_tables.shape[0]
    check_shape("seq_lens", seq_lens, num_requests)
    check_shape("query_start_loc", query_start_loc, num_requests + 1)
    if key_cache.shape[2] == 0 or query.shape[1] % key_cache.shape[2]:
        raise KernelArgumentError(
            "query", f"of {query.shape[1]} heads", f"a multiple of {key_cache.shape[2]} heads"
        )
    check_dtype("query", query, *FLOATS)
    check_dtype("block_tables", block_tables, torch.int32)
    check_dtype("seq_lens", seq_lens, torch.int32)
    check_dtype("query_start_loc", query_start_loc, torch.int32)
    check_device(
        query.device,
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
    )
