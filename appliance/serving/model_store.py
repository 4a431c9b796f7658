"""The model store as the product sees it: plain data, and the product's own errors."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings

from appliance.errors import BadRequest
from inference.errors import InferenceError
from inference.model_store import ModelStore

Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model: in the store, or one that could be fetched."""

    name: str
    # Empty for a model that is not here yet.
    architecture: str
    num_bytes: int
    context_tokens: int
    is_here: bool
    # Chosen for the next start.
    is_selected: bool
    summary: str


def models_list() -> list[ModelRow]:
    """What is in the store, then what the catalogue has besides."""
    store = _store()
    summaries = {entry.name: entry for entry in store.catalogue()}
    rows = []
    for model in store.list():
        entry = summaries.pop(model.name, None)
        rows.append(
            ModelRow(
                model.name,
                model.architecture,
                model.num_bytes,
                model.max_position,
                True,
                model.is_selected,
                entry.summary if entry else "",
            )
        )
    rows += [
        ModelRow(entry.name, "", entry.needed_bytes, 0, False, False, entry.summary)
        for entry in summaries.values()
    ]
    return rows


def model_ensure(on_progress: Progress) -> Path:
    """Have the model that the next start serves, fetching it if need be. Raises BadRequest."""
    try:
        return _store().ensure(settings.APPLIANCE_MODEL, on_progress)
    except InferenceError as exc:
        raise BadRequest(str(exc), param="name") from exc


def model_pull(name: str, on_progress: Progress) -> Path:
    """Fetch a model of the catalogue. Raises BadRequest with what to do."""
    try:
        return _store().pull(name, on_progress)
    except InferenceError as exc:
        raise BadRequest(str(exc), param="name") from exc


def model_import(path: Path, name: str | None, on_progress: Progress) -> Path:
    """Take in a .gguf file or a model folder. Raises BadRequest with what to do."""
    try:
        return _store().import_path(path, name=name, on_progress=on_progress)
    except InferenceError as exc:
        raise BadRequest(str(exc), param="path") from exc


def model_use(name: str) -> None:
    """Serve this model from the next start on. Raises BadRequest if it is not in the store."""
    try:
        _store().use(name)
    except InferenceError as exc:
        raise BadRequest(str(exc), param="name") from exc


def _store() -> ModelStore:
    return ModelStore(settings.MODELS_DIR)
