"""Launches of every Triton kernel in the sizes of real models, on the meta device."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kernels.backends import Backend
from kernels.kv_cache_write import kv_cache_write
from kernels.paged_attention import paged_attention
from kernels.quant_linear import quant_linear, triton_quant_linear
from kernels.quant_linear.packing import QuantWeight
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary_kv_write import rotary_kv_write
from kernels.sampling import penalise, sample
from kernels.silu_and_mul import silu_and_mul

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
_TRITON = {"backend": Backend.TRITON}


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attention(
    head_dim: int,
    dtype: torch.dtype = BF16,
    *,
    num_decodes: int,
    heads: tuple[int, int] = (32, 8),
    in_8_bits: bool = False,
    **options: Any,
) -> None:
    """16 requests of one token, or one of 512."""
    num_tokens = num_decodes or 512
    num_requests = num_decodes or 1
    cache, scales = cache_and_scales(heads[1], head_dim, torch.int8 if in_8_bits else dtype)
    paged_attention(
        meta(num_tokens, heads[0], head_dim, dtype=dtype),
        cache,
        cache,
        meta(num_requests, 64, dtype=torch.int32),
        meta(num_requests, dtype=torch.int32),
        meta(num_requests + 1, dtype=torch.int32),
        scale=0.1,
        num_decodes=num_decodes,
        key_scales=scales,
        value_scales=scales,
        **options,
        **_TRITON,
    )


def cache_and_scales(
    num_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    scales = meta(1000, 16, num_heads, dtype=FP32) if dtype == torch.int8 else None
    return meta(1000, 16, num_heads, head_dim, dtype=dtype), scales


def write(op: Callable[..., Any], *before: Tensor, dtype: torch.dtype = BF16) -> None:
    cache, scales = cache_and_scales(8, 128, dtype)
    slots = meta(16, dtype=torch.int64)
    op(*before, cache, cache, slots, key_scales=scales, value_scales=scales, **_TRITON)


def multiply(
    num_rows: int,
    dtype: torch.dtype = BF16,
    *,
    bits: int,
    with_mins: bool,
    num_splits: int = 1,
    group: int = 32,
    scale_dtype: torch.dtype = FP16,
) -> None:
    """The attention's output projection of an 8B model."""
    num_columns, depth = 4096, 4096
    groups = depth // group
    scales = meta(groups, num_columns, dtype=scale_dtype)
    packed = groups // 2 if bits == 4 else groups
    quants = meta(packed, num_columns, group, dtype=torch.uint8)
    weight = QuantWeight(quants, scales, scales if with_mins else None, bits, depth)
    with mock.patch.object(triton_quant_linear, "choose_num_splits", return_value=num_splits):
        quant_linear(meta(num_rows, depth, dtype=dtype), weight, **_TRITON)


def draw() -> None:
    whole, real = meta(16, dtype=torch.int64), meta(16, dtype=FP32)
    options = {"temperature": real, "top_k": whole, "top_p": real, "min_p": real}
    sample(meta(16, 128_256, dtype=FP32), whole, whole, **options, **_TRITON)


def lower() -> None:
    whole, real = meta(700, dtype=torch.int64), meta(700, dtype=FP32)
    options = {"repetition": real, "presence": real, "frequency": real}
    penalise(meta(16, 128_256, dtype=FP32), whole, whole, whole, **options, **_TRITON)


_HEADS = meta(16, 48, 128)
_ANGLES = meta(16, 128, dtype=FP32)
_decode = functools.partial(attention, num_decodes=16)
_one_decode = functools.partial(attention, num_decodes=1, heads=(8, 2))
_prefill = functools.partial(attention, num_decodes=0)

CASES: dict[str, Callable[[], Any]] = {
    "rms_norm 4096": lambda: rms_norm(meta(16, 4096), meta(4096, dtype=FP32), 1e-5, **_TRITON),
    "rms_norm of heads": lambda: rms_norm(_HEADS[:, :32], meta(128, dtype=FP32), 1e-5, **_TRITON),
    "add_rms_norm 8192": lambda: add_rms_norm(
        meta(16, 8192), meta(16, 8192), meta(8192, dtype=FP32), 1e-5, **_TRITON
    ),
    "kv_cache_write": lambda: write(kv_cache_write, _HEADS[:, 32:40], _HEADS[:, 40:]),
    "kv_cache_write int8": lambda: write(
        kv_cache_write, _HEADS[:, 32:40], _HEADS[:, 40:], dtype=torch.int8
    ),
    "rotary_kv_write": lambda: write(rotary_kv_write, _HEADS[:, :40], _HEADS[:, 40:], _ANGLES),
    "rotary_kv_write int8": lambda: write(
        rotary_kv_write, _HEADS[:, :40], _HEADS[:, 40:], _ANGLES, dtype=torch.int8
    ),
    "silu_and_mul": lambda: silu_and_mul(meta(16, 28672), **_TRITON),
    "quant_linear 4 bits, 1 row": lambda: multiply(1, bits=4, with_mins=False, num_splits=4),
    "quant_linear 4 bits with mins, 16 rows": lambda: multiply(16, bits=4, with_mins=True),
    "quant_linear 4 bits with mins, 64 rows": lambda: multiply(64, bits=4, with_mins=True),
    "quant_linear 8 bits, 16 rows": lambda: multiply(16, bits=8, with_mins=False),
    "quant_linear 8 bits, 64 rows": lambda: multiply(64, bits=8, with_mins=False),
    "quant_linear 8 bits, 32 rows fp16": lambda: multiply(32, FP16, bits=8, with_mins=False),
    "quant_linear Q4_K, 64 rows": lambda: multiply(64, bits=4, with_mins=True, scale_dtype=FP32),
    "quant_linear Q5_K, 64 rows": lambda: multiply(64, bits=5, with_mins=True, scale_dtype=FP32),
    "quant_linear Q6_K, 64 rows": lambda: multiply(
        64, bits=6, with_mins=False, scale_dtype=FP32, group=16
    ),
    "sample": draw,
    "penalise": lower,
    "decode 64": lambda: _one_decode(64),
    "decode 96 fp16": lambda: _decode(96, FP16),
    "decode 128": lambda: _decode(128),
    "decode 128 fp32": lambda: _decode(128, FP32),
    "decode 64 int8": lambda: _one_decode(64, in_8_bits=True),
    "decode 128 int8": lambda: _decode(128, in_8_bits=True),
    "decode 128 int8 fp16": lambda: _decode(128, FP16, in_8_bits=True),
    "decode 256 int8": lambda: _decode(256, in_8_bits=True),
    "decode 256 window cap": lambda: _decode(256, sliding_window=1024, soft_cap=50.0),
    "prefill 64": lambda: _prefill(64),
    "prefill 80 fp16": lambda: _prefill(80, FP16),
    "prefill 128": lambda: _prefill(128),
    "prefill 128 fp32": lambda: _prefill(128, FP32),
    "prefill 64 int8": lambda: _prefill(64, in_8_bits=True),
    "prefill 128 int8": lambda: _prefill(128, in_8_bits=True),
    "prefill 128 int8 fp16": lambda: _prefill(128, FP16, in_8_bits=True),
    "prefill 256 int8": lambda: _prefill(256, in_8_bits=True),
    "prefill 256 window cap": lambda: _prefill(256, sliding_window=1024, soft_cap=50.0),
}
