"""Angles of rotary position embedding (arXiv:2104.09864) and of its stretched forms.

A table of cosines and sines is made once for every position that the server allows. A stretched
form whose angles depend on the length takes the server's longest length for all positions, because
keys stay in the cache: a key rotated for a short text must fit queries of the same text grown long.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from inference.errors import ModelLoadError
from inference.models.spec import RopeSpec


class RotaryTable(nn.Module):
    """cos and sin of every position below `max_positions`, in fp32."""

    cos_sin: Tensor

    def __init__(self, spec: RopeSpec, max_positions: int, device: torch.device) -> None:
        super().__init__()
        inverse_wavelengths, amplitude = rotary_frequencies(spec, max_positions)
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, inverse_wavelengths)
        table = torch.cat([angles.cos(), angles.sin()], dim=1) * amplitude
        self.register_buffer("cos_sin", table.to(device), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        """[num_tokens, rotary_dim] fp32, cosines then sines, of [num_tokens] int64 positions."""
        return self.cos_sin[positions]


def rotary_frequencies(spec: RopeSpec, max_positions: int) -> tuple[Tensor, float]:
    """Angle per position of each pair, [rotary_dim / 2] fp32, and what cos and sin are times.

    Raises:
        ModelLoadError: an unknown kind, or a field of it is missing.
    """
    make = _KINDS.get(spec.kind)
    if make is None:
        raise ModelLoadError(
            f"The checkpoint stretches positions by {spec.kind!r}, which is not supported; "
            f"supported are {', '.join(sorted(_KINDS))}."
        )
    try:
        return make(spec, max_positions)
    except (KeyError, TypeError, ZeroDivisionError) as exc:
        raise ModelLoadError(
            f"The checkpoint's rope parameters for {spec.kind!r} are incomplete: {exc}."
        ) from exc


def _plain(spec: RopeSpec, base: float | None = None) -> Tensor:
    steps = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    return 1.0 / ((spec.theta if base is None else base) ** steps)


def _default(spec: RopeSpec, max_positions: int) -> tuple[Tensor, float]:
    return _plain(spec), 1.0


def _linear(spec: RopeSpec, max_positions: int) -> tuple[Tensor, float]:
    """Positions are divided by a factor (arXiv:2306.15595)."""
    return _plain(spec) / float(spec.parameters["factor"]), 1.0


def _dynamic(spec: RopeSpec, max_positions: int) -> tuple[Tensor, float]:
    """The base grows with the length, once that passes what the model was trained on."""
    factor = float(spec.parameters["factor"])
    stretch = max(max_positions, spec.max_position) / spec.max_position
    growth = factor * stretch - (factor - 1)
    dim = spec.rotary_dim
    return _plain(spec, spec.theta * growth ** (dim / (dim - 2))), 1.0


def _llama3(spec: RopeSpec, max_positions: int) -> tuple[Tensor, float]:
    """Long wavelengths are stretched, short ones kept, those between are blended."""
    factor = float(spec.parameters["factor"])
    low = float(spec.parameters["low_freq_factor"])
    high = float(spec.parameters["high_freq_factor"])
    trained = float(spec.parameters["original_max_position_embeddings"])
    plain = _plain(spec)
    turns = trained * plain / (2 * math.pi)  # full turns within the trained length
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * kept + plain / factor * (1 - kept), 1.0


def _yarn(spec: RopeSpec, max_positions: int) -> tuple[Tensor, float]:
    """Pairs are blended by how often they turn within the trained length (arXiv:2309.00071)."""
    parameters = spec.parameters
    trained = float(parameters.get("original_max_position_embeddings") or spec.max_position)
    factor = float(parameters.get("factor") or spec.max_position / trained)
    dim = spec.rotary_dim

    def pair_that_turns(times: float) -> float:
        return dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(spec.theta))

    first = pair_that_turns(float(parameters.get("beta_fast") or 32))
    last = pair_that_turns(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    plain = _plain(spec)
    return plain / factor * stretched + plain * (1 - stretched), _yarn_amplitude(spec, factor)


def _yarn_amplitude(spec: RopeSpec, factor: float) -> float:
    given = spec.parameters.get("attention_factor")
    if given is not None:
        return float(given)

    def amplitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    upper = spec.parameters.get("mscale")
    lower = spec.parameters.get("mscale_all_dim")
    if upper and lower:
        return amplitude(float(upper)) / amplitude(float(lower))
    return amplitude(1.0)


def _longrope(spec: RopeSpec, max_positions: int) -> tuple[Tensor, float]:
    """Each pair has its own stretch, one set for short servers and one for long
    (arXiv:2402.13753)."""
    parameters = spec.parameters
    trained = int(parameters["original_max_position_embeddings"])
    which = "long_factor" if max_positions > trained else "short_factor"
    stretch = torch.tensor(parameters[which], dtype=torch.float32)
    if stretch.shape != (spec.rotary_dim // 2,):
        raise ModelLoadError(
            f"The checkpoint's {which} has {stretch.numel()} numbers; "
            f"{spec.rotary_dim // 2} are needed."
        )
    given = parameters.get("attention_factor")
    ratio = float(parameters.get("factor") or spec.max_position / trained)
    grown = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(trained))
    return _plain(spec) / stretch, grown if given is None else float(given)


_KINDS: dict[str, Callable[[RopeSpec, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
