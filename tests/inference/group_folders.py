"""Model folders with quantised groups beside their weights."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inference.weights.header import GROUPS_FILE, GROUPS_FORMAT
from tests.kernels.group_cases import random_groups


def write_groups(folder: Path) -> None:
    """Replace the model's linears by random groups: the side file, and what it stands for."""
    rng = torch.Generator().manual_seed(8)
    weights = load_file(folder / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not name.endswith(("_proj.weight", "embed_tokens.weight", "lm_head.weight")):
            continue
        eight = "embed" in name or "lm_head" in name or "o_proj" in name
        groups = random_groups(
            rng, *weight.shape, bits=8 if eight else 4, with_mins="mlp" in name and not eight
        )
        stem = name.removesuffix(".weight")
        tensors[f"{stem}.quants"], tensors[f"{stem}.scales"] = groups.quants, groups.scales
        if groups.mins is not None:
            tensors[f"{stem}.mins"] = groups.mins
        weights[name] = groups.weight.float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, folder / GROUPS_FILE, metadata={"format": GROUPS_FORMAT})
