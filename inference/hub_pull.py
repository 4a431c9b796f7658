"""From a repository of the hub to a model of the store: whole, or not at all. No torch.

What is fetched lies in a hidden folder of the store, named after the commit, so that a later try
goes on where an earlier one broke off; the model itself appears in one rename.
"""

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from inference.config import ModelConfig
from inference.errors import ModelLoadError
from inference.fit import Machine, fit
from inference.hub import Hub, HubModel, HubReference, has_origin, write_origin
from inference.model_store import ModelStore, ModelStoreError, check_servable, slug_of

Progress = Callable[[float, str], None]

_PARTIAL_PREFIX = ".partial-"
# Weights rewritten from a GGUF file take at most this many times its size while they are imported.
_GGUF_DISK_FACTOR = 6
_FETCH_SHARE = 0.8


def pull_from_hub(
    store: ModelStore,
    hub: Hub,
    reference: HubReference,
    machine: Machine,
    *,
    on_progress: Progress,
    on_note: Callable[[str], None],
) -> Path:
    """Fetch, check and store a model. Does nothing if this very commit is there.

    Args:
        machine: what `on_note` tells the fit for, before anything large is fetched.

    Raises:
        HubError: it is not there, or cannot be fetched; what was fetched is kept for another try.
        ModelLoadError: it cannot be served.
        ModelStoreError: the disk is too small, or it is being fetched already.
    """
    on_progress(0.0, f"asking for {reference.repo}")
    model = hub.look(reference)
    name = slug_of(Path(model.gguf).stem if model.gguf else model.repo.partition("/")[2])
    if has_origin(store.root / name, model):
        on_progress(1.0, "already here")
        return store.root / name
    with _partial(store.root, name, model) as partial:
        config = hub.config_of(model, partial)
        on_note(_note(model, config, machine))
        store.need_disk(_bytes_needed(model, partial))
        hub.fetch(model, partial, lambda share, what: on_progress(_FETCH_SHARE * share, what))
        folder = _taken_in(store, name, model, partial, on_progress)
        shutil.rmtree(partial, ignore_errors=True)
    on_progress(1.0, "done")
    return folder


def _taken_in(
    store: ModelStore, name: str, model: HubModel, partial: Path, on_progress: Progress
) -> Path:
    def report(share: float, what: str) -> None:
        on_progress(_FETCH_SHARE + (1 - _FETCH_SHARE) * share, what)

    def finish(folder: Path) -> None:
        check_servable(folder)
        write_origin(folder, model)

    if model.gguf is not None:
        gguf = partial / Path(model.gguf).name
        return store.import_path(gguf, name=name, on_progress=report, finish=finish)
    report(0.0, "checking the files")
    try:
        check_servable(partial)
    except ModelLoadError:
        # Files of the right size with the wrong content would be wrong the next time too.
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return store.import_path(partial, name=name, on_progress=report, finish=finish, move=True)


def _note(model: HubModel, config: ModelConfig | None, machine: Machine) -> str:
    size = (
        f"{model.num_bytes / 1e6:,.0f} MB will be fetched from {model.repo}, commit "
        + (model.commit[:12])
    )
    weight_bytes = model.weight_bytes(config)
    if config is not None:
        return f"{size}. {fit(config, weight_bytes, machine, dtype='bfloat16').words()}"
    free = machine.free_bytes
    verdict = "fit" if weight_bytes < free else "do not fit"
    return (
        f"{size}. Its weights need about {weight_bytes / 1e9:,.1f} GB in memory; they {verdict} "
        f"{machine.name} with {free / 1e9:,.1f} GB free. How many answers at the same time is told "
        "once it is here: the repository has no config.json beside the file."
    )


def _bytes_needed(model: HubModel, partial: Path) -> int:
    here = sum(path.stat().st_size for path in partial.iterdir() if path.is_file())
    needed = max(0, model.num_bytes - here)
    return needed + (_GGUF_DISK_FACTOR * model.num_bytes if model.gguf else 0)


@contextmanager
def _partial(root: Path, name: str, model: HubModel) -> Iterator[Path]:
    """The folder of what was fetched so far, for one process at a time."""
    partial = root / f"{_PARTIAL_PREFIX}{name}-{model.commit[:12]}"
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with partial.with_name(partial.name + ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ModelStoreError(f"{model.repo} is being fetched already.") from None
            _drop_older(root, name, partial)
            yield partial
    except OSError as exc:
        raise ModelStoreError(f"The model store {root} cannot be written: {exc}.") from exc


def _drop_older(root: Path, name: str, kept: Path) -> None:
    """Parts of other commits of the same model would never be gone on with."""
    for path in root.glob(f"{_PARTIAL_PREFIX}{name}-*"):
        if path.is_dir() and path != kept:
            shutil.rmtree(path, ignore_errors=True)
