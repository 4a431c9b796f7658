"""GGUF block formats -> float32, and -> the groups of 32 that the CPU kernels read. numpy only.

A function gets whole blocks, `[num_blocks, bytes of a block] uint8`, and returns
`[num_blocks, elements of a block] float32`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from inference.weights.gguf_reader import GGML_TYPES

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_BLOCK = {name: (elements, size) for name, elements, size in GGML_TYPES.values()}
# Kept as they are for the CPU kernels, which read the blocks themselves.
SUPER_BLOCK_TYPES = frozenset({"Q4_K", "Q5_K", "Q6_K"})


def dequantize(type_name: str, data: Bytes) -> Floats:
    """Flat bytes of whole blocks -> flat float32."""
    if type_name == "F32":
        return data.view("<f4").astype(np.float32, copy=False)
    if type_name == "F16":
        return data.view("<f2").astype(np.float32)
    if type_name == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    blocks = data.reshape(-1, _BLOCK[type_name][1])
    return _QUANTIZED[type_name](blocks).reshape(-1)


def to_bfloat16_bits(values: Floats) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even; NaN stays NaN. Returns the 16-bit patterns."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits >> 16) & 1) + np.uint32(0x7FFF)
    rounded += bits
    rounded >>= 16
    out = rounded.astype(np.uint16)
    not_a_number = np.isnan(values)
    if not_a_number.any():
        out[not_a_number] = 0x7FC0
    return out


@dataclass(frozen=True, slots=True)
class QuantGroups:
    """A matrix in groups of 32 along its rows: w = scale * q + min.

    quants: uint8 `[N, K / 2]` (4 bit: byte j holds k = 2j in the low nibble and k = 2j + 1 in the
    high one) or `[N, K]` (8 bit, stored as q + 128). scales, mins: float16 `[N, K / 32]`; without
    mins w = scale * (q - 8) for 4 bit and scale * (stored - 128) for 8 bit.
    """

    quants: Bytes
    scales: npt.NDArray[np.float16]
    mins: npt.NDArray[np.float16] | None


def to_quant_groups(type_name: str, data: Bytes, shape: tuple[int, ...]) -> QuantGroups | None:
    """The exact groups of a Q4_0, Q4_1 or Q8_0 matrix; None for every other format."""
    if type_name not in ("Q4_0", "Q4_1", "Q8_0") or len(shape) != 2:
        return None
    rows = shape[0]
    blocks = data.reshape(-1, _BLOCK[type_name][1])
    scales = _half(blocks, 0).reshape(rows, -1)
    if type_name == "Q8_0":
        return QuantGroups((blocks[:, 2:] ^ np.uint8(0x80)).reshape(rows, -1), scales, None)
    mins = _half(blocks, 2).reshape(rows, -1) if type_name == "Q4_1" else None
    nibbles = blocks[:, 4 if mins is not None else 2 :]
    low, high = nibbles & 0x0F, nibbles >> 4
    halves = [half[:, 0::2] | (half[:, 1::2] << 4) for half in (low, high)]
    return QuantGroups(np.concatenate(halves, axis=1).reshape(rows, -1), scales, mins)


def _half(blocks: Bytes, at: int) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float16, copy=False)


def _scale(blocks: Bytes, at: int) -> Floats:
    return _half(blocks, at).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """`[..., n]` -> `[..., 2n]`: all low nibbles, then all high ones."""
    return np.concatenate((packed & 0x0F, packed >> 4), axis=-1)


def _q4_0(blocks: Bytes) -> Floats:
    return _scale(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    values = _nibbles(blocks[:, 4:]).astype(np.float32)
    values *= _scale(blocks, 0)
    values += _scale(blocks, 2)
    return values


def _q8_0(blocks: Bytes) -> Floats:
    return _scale(blocks, 0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)


def _k_scales_and_mins(packed: Bytes) -> tuple[Floats, Floats]:
    """Twelve bytes of 6-bit numbers -> eight scales and eight mins, each `[num_blocks, 8]`."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((first & 63, (third & 0x0F) | ((first >> 6) << 4)), axis=1)
    mins = np.concatenate((second & 63, (third >> 4) | ((second >> 6) << 4)), axis=1)
    return scales.astype(np.float32), mins.astype(np.float32)


def _q4_k(blocks: Bytes) -> Floats:
    scales, mins = _k_scales_and_mins(blocks[:, 4:16])
    quants = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return _k_values(blocks, scales, mins, quants)


def _q5_k(blocks: Bytes) -> Floats:
    scales, mins = _k_scales_and_mins(blocks[:, 4:16])
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    # Bit g of byte l is the fifth bit of element l in group g.
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = (blocks[:, 16:48].reshape(-1, 1, 32) >> shifts) & np.uint8(1)
    return _k_values(blocks, scales, mins, low | (high << np.uint8(4)))


def _k_values(blocks: Bytes, scales: Floats, mins: Floats, quants: Bytes) -> Floats:
    values = quants.astype(np.float32)
    values *= (_scale(blocks, 0) * scales)[:, :, None]
    values -= (_scale(blocks, 2) * mins)[:, :, None]
    return values.reshape(-1, 256)


def _q6_k(blocks: Bytes) -> Floats:
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    # [num_blocks, half, quarter, 32]: quarters 0 and 1 are low nibbles, 2 and 3 the high ones.
    low = np.concatenate((low & 0x0F, low >> 4), axis=2)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    values = (low | (high << 4)).astype(np.float32).reshape(-1, 16, 16) - 32
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    values *= (_scale(blocks, 208) * scales)[:, :, None]
    return values.reshape(-1, 256)


_QUANTIZED: dict[str, Callable[[Bytes], Floats]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
