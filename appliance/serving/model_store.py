"""The model store as the product sees it: plain data, and the product's own errors."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings

from appliance.errors import BadRequest, Conflict, EngineUnavailable, NotFound
from appliance.serving.gateway import get_backend
from inference.config import ModelConfig
from inference.errors import InferenceError, ModelLoadError
from inference.fit import Machine, fit, weight_bytes_of
from inference.hub import Hub, parse_reference
from inference.hub_pull import pull_from_hub
from inference.machine import this_machine
from inference.model_store import ModelStore, ModelStoreError, check_servable

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
    # Of the stored weights, for people.
    precision: str = ""

    @property
    def family(self) -> str:
        return self.architecture.removesuffix("ForCausalLM")


@dataclass(frozen=True, slots=True)
class FitWords:
    """Whether a stored model would fit, in words for people."""

    fits: bool
    words: str


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
                model.precision,
            )
        )
    rows += [
        ModelRow(entry.name, "", entry.needed_bytes, 0, False, False, entry.summary)
        for entry in summaries.values()
    ]
    return rows


def model_fits(names: list[str], loaded: str | None) -> dict[str, FitWords]:
    """Name -> whether it would fit once the loaded model has given its memory back. Blocking."""
    store = _store()
    try:
        machine = _machine(store, loaded)
    except InferenceError as exc:
        return {name: FitWords(False, str(exc)) for name in names}
    found = {}
    for name in names:
        try:
            folder = store.path_of(name)
            kv_dtype = "int8" if settings.APPLIANCE_KV_DTYPE == "int8" else "bfloat16"
            result = fit(
                ModelConfig.from_dir(folder), weight_bytes_of(folder), machine, dtype=kv_dtype
            )
            found[name] = FitWords(result.fits, result.words())
        except (InferenceError, OSError) as exc:
            found[name] = FitWords(False, str(exc))
    return found


def model_ensure(on_progress: Progress) -> Path:
    """Have the model that the next start serves, fetching it if need be. Raises BadRequest."""
    try:
        return _store().ensure(settings.APPLIANCE_MODEL, on_progress)
    except InferenceError as exc:
        raise BadRequest(str(exc), param="name") from exc


def model_pull(
    name: str, on_progress: Progress, on_note: Callable[[str], None] = lambda text: None
) -> Path:
    """Fetch a model of the catalogue, or ORG/MODEL[@REVISION][:FILE.gguf] of the hub.

    Args:
        on_note: told, before anything large is fetched, whether the model will fit.

    Raises:
        BadRequest: with what to do.
    """
    store, reference = _store(), parse_reference(name)
    try:
        if reference is None:
            return store.pull(name, on_progress)
        return pull_from_hub(
            store,
            Hub(settings.APPLIANCE_HUB_URL, _hub_token()),
            reference,
            _machine(store, None),
            on_progress=on_progress,
            on_note=on_note,
        )
    except InferenceError as exc:
        raise BadRequest(str(exc), param="name") from exc


def _hub_token() -> str | None:
    """Raises BadRequest when the file can be read by others, or not by us."""
    if not settings.APPLIANCE_HUB_TOKEN_FILE:
        return None
    path = Path(settings.APPLIANCE_HUB_TOKEN_FILE)
    try:
        if path.stat().st_mode & 0o077:
            raise BadRequest(
                f"Others than its owner may read {path}, which holds the hub's token. Run: "
                f"chmod 600 {path}"
            )
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as exc:
        why = getattr(exc, "strerror", None) or "it holds more than plain letters"
        raise BadRequest(
            f"The hub's token cannot be read from {path} (APPLIANCE_HUB_TOKEN_FILE): {why}."
        ) from exc
    return token or None


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


def model_folder(name: str) -> Path:
    """The checked folder of a stored model.

    Raises:
        NotFound: there is no such model.
        BadRequest: it cannot be served; the message says why.
    """
    try:
        folder = _store().path_of(name)
        check_servable(folder)
    except ModelStoreError as exc:
        raise NotFound(str(exc), param="model") from exc
    except ModelLoadError as exc:
        raise BadRequest(str(exc), param="model") from exc
    return folder


def model_delete(name: str) -> None:
    """Take a model out of the store for good.

    Raises:
        NotFound: there is no such model.
        Conflict: it is loaded, or is being loaded.
    """
    if name in _names_in_use():
        raise Conflict(f"{name} is loaded. Load another model first, then delete it.")
    try:
        _store().delete(name)
    except InferenceError as exc:
        raise NotFound(str(exc), param="name") from exc


def _names_in_use() -> set[str]:
    try:
        state = get_backend().state()
    except EngineUnavailable:
        return set()
    model, swap = state.get("model"), state.get("swap")
    names = {model["name"]} if model else set()
    if swap and swap["stage"] not in ("done", "failed"):
        names |= {swap["model"]}
    if not names:
        # While it loads or has failed nobody can say what it holds or goes back to.
        names = {row.name for row in models_list() if row.is_here}
    return names


def _machine(store: ModelStore, loaded: str | None) -> Machine:
    megabytes = settings.APPLIANCE_KV_MEMORY_MB
    machine = this_machine(settings.APPLIANCE_DEVICE, megabytes * 1024 * 1024 or None)
    if loaded is None:
        return machine
    try:
        given_back = weight_bytes_of(store.path_of(loaded))
    except (InferenceError, OSError):
        # It was loaded from a folder outside the store.
        given_back = 0
    return Machine(
        name=machine.name,
        free_bytes=machine.free_bytes + given_back,
        kv_share=machine.kv_share,
        max_full_contexts=machine.max_full_contexts,
        kv_bytes=machine.kv_bytes,
    )


def _store() -> ModelStore:
    return ModelStore(settings.MODELS_DIR)
