"""Safetensors of a model folder into a decoder. Nothing else is ever read as weights: no pickles,
no code of the checkpoint's. Names and shapes are checked from the headers before a byte is loaded.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inference.errors import MissingWeights, ModelLoadError
from inference.layers.linear import Linear
from inference.models.decoder import Decoder
from inference.weights.names import checkpoint_names

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARDS = "model-*-of-*.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FLOATS = ("F64", "F32", "F16", "BF16")
# Names listed in one error message.
_MAX_NAMED = 5


def check_model_dir(model_dir: Path) -> None:
    """The folder exists, and nothing in it leads out of it.

    Raises:
        ModelLoadError
    """
    if not model_dir.is_dir():
        raise ModelLoadError(f"{model_dir} is not a folder; a model folder is needed.")
    root = model_dir.resolve()
    for entry in model_dir.iterdir():
        if entry.is_symlink() and not entry.resolve().is_relative_to(root):
            raise ModelLoadError(
                f"{entry} is a link to {entry.resolve()}, outside the model folder. "
                "Copy the file into the folder instead."
            )


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """Tensors of a model folder by name. Opening it reads headers only.

    Raises:
        ModelLoadError: no safetensors, a broken file, an index that names files outside the folder.
    """

    def __init__(self, model_dir: Path) -> None:
        check_model_dir(model_dir)
        self.model_dir = model_dir
        self._files: dict[Path, Any] = {}
        self._entries: dict[str, _Entry] = {}
        for path in _weight_files(model_dir):
            self._add(path)

    def _add(self, path: Path) -> None:
        try:
            opened: Any = safe_open(path, framework="pt")
            for name in opened.keys():  # noqa: SIM118 - not a dict
                part = opened.get_slice(name)
                self._entries[name] = _Entry(path, tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as exc:
            raise ModelLoadError(f"{path} is not a readable safetensors file: {exc}") from exc
        self._files[path] = opened

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def num_elements(self) -> int:
        """Numbers in all tensors together."""
        return sum(math.prod(entry.shape) for entry in self._entries.values())

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, in the checkpoint's dtype."""
        entry = self._entries[name]
        if entry.dtype not in _FLOATS:
            raise ModelLoadError(
                f"{entry.path}: {name} has dtype {entry.dtype}; {', '.join(_FLOATS)} can be served."
            )
        try:
            tensor: Tensor = self._files[entry.path].get_tensor(name)
        except (SafetensorError, OSError) as exc:
            raise ModelLoadError(f"{entry.path} cannot be read: {exc}") from exc
        return tensor


def load_weights(
    decoder: Decoder, checkpoint: Checkpoint, on_progress: Callable[[float, str], None]
) -> None:
    """Fill the decoder's parameters, then `decoder.prepare()`.

    Args:
        on_progress: share done in [0, 1] and what is being read.

    Raises:
        MissingWeights: a tensor is absent or ill-shaped; found before anything is read.
        ModelLoadError: a file cannot be read.
    """
    parts = list(_plan(decoder, checkpoint))
    total = sum(part.target.numel() for part in parts)
    done = 0
    for part in parts:
        part.target.copy_(checkpoint.read(part.name))
        done += part.target.numel()
        on_progress(done / total, "reading weights")
    decoder.prepare()


@dataclass(frozen=True, slots=True)
class _Part:
    """A checkpoint tensor and the rows of the parameter that it fills."""

    name: str
    target: Tensor


def _plan(decoder: Decoder, checkpoint: Checkpoint) -> Iterator[_Part]:
    missing: list[str] = []
    ill_shaped: list[str] = []
    parts: list[_Part] = []
    for parameter, tensor in decoder.named_parameters():
        for part in _parts_of(decoder, checkpoint, parameter, tensor.data):
            want = tuple(part.target.shape)
            if part.name not in checkpoint:
                missing.append(part.name)
            elif checkpoint.shape(part.name) != want:
                ill_shaped.append(
                    f"{part.name} {list(checkpoint.shape(part.name))} instead of {list(want)}"
                )
            else:
                parts.append(part)
    if missing or ill_shaped:
        problems = [f"{what}: {_listed(names)}" for what, names in _named(missing, ill_shaped)]
        raise MissingWeights(f"{checkpoint.model_dir} cannot be loaded. {'; '.join(problems)}.")
    return iter(parts)


def _parts_of(
    decoder: Decoder, checkpoint: Checkpoint, parameter: str, tensor: Tensor
) -> list[_Part]:
    (stacked_name, *more) = checkpoint_names(decoder.spec, parameter, stacked=True)
    assert not more, f"{parameter} is one tensor when stacked"
    if stacked_name in checkpoint:
        return [_Part(stacked_name, tensor)]
    names = checkpoint_names(decoder.spec, parameter, stacked=False)
    if len(names) == 1:
        return [_Part(names[0], tensor)]
    module = decoder.get_submodule(parameter.rpartition(".")[0])
    assert isinstance(module, Linear), f"{parameter} is stacked, so its module is linear"
    targets = torch.split(tensor, list(module.part_sizes))
    return [_Part(name, target) for name, target in zip(names, targets, strict=True)]


def _named(missing: list[str], ill_shaped: list[str]) -> Iterator[tuple[str, list[str]]]:
    if missing:
        yield "Missing tensors", missing
    if ill_shaped:
        yield "Tensors of a wrong shape", ill_shaped


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMED])
    rest = len(names) - _MAX_NAMED
    return f"{shown} and {rest} more" if rest > 0 else shown


def _weight_files(model_dir: Path) -> list[Path]:
    if (model_dir / _INDEX).exists():
        return _indexed_files(model_dir)
    if (model_dir / _SINGLE).exists():
        return [model_dir / _SINGLE]
    shards = sorted(model_dir.glob(_SHARDS))
    if shards:
        return shards
    pickles = [path.name for pattern in _PICKLES for path in sorted(model_dir.glob(pattern))]
    if pickles:
        raise ModelLoadError(
            f"{model_dir} has weights only as pickles ({_listed(pickles)}), which can run code "
            "when read. Convert them to safetensors, or take the model from where it has them."
        )
    raise MissingWeights(f"{model_dir} has no weights; {_SINGLE} is expected.")


def _indexed_files(model_dir: Path) -> list[Path]:
    index = model_dir / _INDEX
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ModelLoadError(f"{index} is not an index of weights: {exc}.") from exc
    for name in names:
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.endswith(".safetensors")
        ):
            raise ModelLoadError(f"{index} names {name!r}; a safetensors file beside it is needed.")
    absent = sorted(name for name in names if not (model_dir / name).exists())
    if absent:
        raise MissingWeights(f"{model_dir} lacks {_listed(absent)}, which its index names.")
    return [model_dir / name for name in sorted(names)]
