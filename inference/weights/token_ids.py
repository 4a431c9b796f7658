"""What the tokenizer's files say about ids: how many there are, and which ends a sequence.

Read as plain JSON: the runner must know these before anything of the tokenizer is built. No torch.
"""

import json
from pathlib import Path
from typing import Any

from inference.errors import ModelLoadError


def num_token_ids(model_dir: Path) -> int | None:
    """One more than the highest id that the tokenizer can make or read; None without its file.

    The highest id, not the number of entries: a vocabulary with gaps has ids past its size.
    """
    ids = _token_ids(model_dir)
    return max(ids.values(), default=-1) + 1 if ids is not None else None


def tokenizer_eos_id(model_dir: Path) -> int | None:
    """Id of the tokenizer's own end-of-sequence token; it may differ from the model's."""
    config = _read(model_dir / "tokenizer_config.json")
    token = config.get("eos_token") if config is not None else None
    if isinstance(token, dict):
        token = token.get("content")
    ids = _token_ids(model_dir)
    return ids.get(token) if isinstance(token, str) and ids is not None else None


def _token_ids(model_dir: Path) -> dict[str, int] | None:
    path = model_dir / "tokenizer.json"
    tokenizer = _read(path)
    if tokenizer is None:
        return None
    try:
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, dict):
            ids = {token: int(token_id) for token, token_id in vocabulary.items()}
        else:  # a list of [token, score]
            ids = {entry[0]: token_id for token_id, entry in enumerate(vocabulary)}
        for added in tokenizer.get("added_tokens") or []:
            ids[added["content"]] = int(added["id"])
    except (KeyError, IndexError, TypeError, ValueError) as exc:
        raise ModelLoadError(f"{path} is not a tokenizer: {type(exc).__name__} {exc}.") from exc
    return ids


def _read(path: Path) -> dict[str, Any] | None:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise ModelLoadError(f"{path} cannot be read: {exc}") from exc
    if not isinstance(loaded, dict):
        raise ModelLoadError(f"{path} holds no JSON object.")
    return loaded
