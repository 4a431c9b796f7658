"""The models on this machine: a folder of model folders, each under a plain name. No torch.

Every change is made in a work folder beside the models and renamed into place at the end, under a
lock, so that an interrupted pull or import leaves nothing half-made. Names are slugs and paths that
leave the store are refused. No code of a model is ever run and no pickled weights are taken.
"""

import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from inference.config import ModelConfig
from inference.errors import InferenceError, ModelLoadError
from inference.model_catalogue import CATALOGUE, DEFAULT_MODEL, CatalogueEntry, fetch_gguf
from inference.models.registry import decoder_spec
from inference.weights.gguf_import import import_gguf, replace_folder
from inference.weights.header import GROUPS_FILE, read_header

Progress = Callable[[float, str], None]

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?", re.ASCII)
_WORK_PREFIX = ".work-"
_SELECTED = ".selected"
_COPIED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)
# What stays free on the disk for everything else.
_SPARE_BYTES = 200_000_000


class ModelStoreError(InferenceError):
    """A model could not be listed, fetched, imported or chosen; the message says what to do."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model folder of the store."""

    name: str
    path: Path
    architecture: str
    num_bytes: int
    max_position: int
    # Of the stored weights, for people: "bfloat16".
    precision: str
    is_selected: bool


class ModelStore:
    """Model folders below `root`. Usable from any thread or process; changes hold a file lock."""

    def __init__(self, root: Path, *, catalogue: Mapping[str, CatalogueEntry] = CATALOGUE) -> None:
        self.root = root
        self._catalogue = catalogue

    def list(self) -> list[StoredModel]:
        """The usable models, by name. A folder that is no model is left out."""
        found = []
        selected = self.selected()
        for path in sorted(self.root.iterdir()) if self.root.is_dir() else ():
            if not _NAME.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
                continue
            try:
                config = ModelConfig.from_dir(path)
            except ModelLoadError:
                continue
            num_bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
            found.append(
                StoredModel(
                    path.name,
                    path,
                    config.architecture,
                    num_bytes,
                    config.max_position,
                    _precision(path, config),
                    path.name == selected,
                )
            )
        return found

    def catalogue(self) -> tuple[CatalogueEntry, ...]:
        """What `pull` knows."""
        return tuple(self._catalogue.values())

    def path_of(self, name: str) -> Path:
        """The folder of a stored model.

        Raises:
            ModelStoreError: no plain name, or no such model; the same message for both.
        """
        if _NAME.fullmatch(name):
            path = self.root / name
            if not path.is_symlink() and (path / "config.json").is_file():
                return path
        hint = (
            f"manage.py models pull {name}" if name in self._catalogue else "manage.py models list"
        )
        raise ModelStoreError(f"There is no model {name[:80]!r} in the store. Try: {hint}")

    def pull(self, name: str, on_progress: Progress = lambda share, what: None) -> Path:
        """Fetch a model of the catalogue, check it, import it. Does nothing if it is there.

        Raises:
            ModelStoreError: unknown name, no network, not enough disk, or a wrong digest.
        """
        entry = self._catalogue.get(name)
        if entry is None:
            known = ", ".join(self._catalogue)
            raise ModelStoreError(
                f"The catalogue has no model {name[:80]!r}; it has {known}. A model of "
                "Hugging Face is named ORG/MODEL."
            )
        with self._changing() as work:
            if (self.root / name / "config.json").is_file():
                on_progress(1.0, "already here")
                return self.root / name
            self.need_disk(entry.needed_bytes)
            gguf = fetch_gguf(entry, work, lambda share, what: on_progress(0.6 * share, what))
            return self._import_gguf(
                gguf, name, work, lambda share, what: on_progress(0.6 + 0.4 * share, what)
            )

    def ensure(self, value: str, on_progress: Progress = lambda share, what: None) -> Path:
        """As `resolve`, but a model of the catalogue that is not here is fetched first.

        Raises:
            ModelStoreError, ModelLoadError: it cannot be had; the message says why.
        """
        wanted = value or self.selected() or DEFAULT_MODEL
        if wanted in self._catalogue:
            return self.pull(wanted, on_progress)
        return self.resolve(wanted, on_progress)

    def ensure_default(self, on_progress: Progress = lambda share, what: None) -> Path:
        """The folder of the bundled default model, fetched and imported if it is not there."""
        return self.pull(DEFAULT_MODEL, on_progress)

    def import_path(
        self,
        path: Path,
        *,
        name: str | None = None,
        on_progress: Progress = lambda share, what: None,
        finish: Callable[[Path], None] = lambda folder: None,
        move: bool = False,
    ) -> Path:
        """Take in a .gguf file or a folder with safetensors; a model of that name is replaced.

        Args:
            finish: called with the whole folder before it becomes a model of the store; may raise.
            move: take a folder's files out of it instead of copying them.

        Raises:
            ModelStoreError: nothing there, a bad name, or not enough disk.
            ModelLoadError: it is no usable model.
        """
        name = slug_of(path.stem if path.suffix == ".gguf" else path.name) if name is None else name
        if not _NAME.fullmatch(name):
            raise ModelStoreError(
                f"{name[:80]!r} is no model name: lower-case letters, digits, dots, dashes and "
                "underscores are allowed, at most 64."
            )
        with self._changing() as work:
            if path.is_dir():
                return self._import_folder(path, name, work, on_progress, finish, move)
            if path.suffix == ".gguf" and path.is_file():
                self.need_disk(6 * path.stat().st_size)
                return self._import_gguf(path, name, work, on_progress, finish)
        raise ModelStoreError(f"{path} is neither a .gguf file nor a folder with a model.")

    def use(self, name: str) -> None:
        """Serve this model from the next start on. Does not wait for a pull that is under way."""
        self.path_of(name)
        try:
            with tempfile.NamedTemporaryFile(
                "w", prefix=_WORK_PREFIX, dir=self.root, delete=False, encoding="utf-8"
            ) as chosen:
                chosen.write(name + "\n")
            os.replace(chosen.name, self.root / _SELECTED)
        except OSError as exc:
            raise self._not_writable(exc) from exc

    def delete(self, name: str) -> None:
        """Take a model out of the store; the caller sees to it that nothing serves it.

        Raises:
            ModelStoreError: there is no such model, or its folder cannot be removed.
        """
        path = self.path_of(name)
        try:
            work = Path(tempfile.mkdtemp(prefix=_WORK_PREFIX, dir=self.root))
            # Gone at once, whatever happens to the files.
            path.rename(work / "deleted")
        except OSError as exc:
            raise self._not_writable(exc) from exc
        shutil.rmtree(work, ignore_errors=True)

    def selected(self) -> str | None:
        """The name last given to `use`; None if there is none or it has gone."""
        try:
            name = (self.root / _SELECTED).read_text(encoding="utf-8").strip()
            self.path_of(name)
        except (OSError, UnicodeDecodeError, ModelStoreError):
            return None
        return name

    def resolve(self, value: str, on_progress: Progress = lambda share, what: None) -> Path:
        """The model folder for a setting: a name, a folder, a .gguf file, or "" for the default.

        "" takes the model chosen with `use`, else the bundled one, which must have been pulled. A
        .gguf file is imported the first time and again when it has changed.

        Raises:
            ModelStoreError, ModelLoadError: there is no such model, or it cannot be used.
        """
        if not value:
            return self.path_of(self.selected() or DEFAULT_MODEL)
        if value in self._catalogue or (_NAME.fullmatch(value) and (self.root / value).is_dir()):
            return self.path_of(value)
        path = Path(value).expanduser()
        if path.suffix == ".gguf" and path.is_file():
            return self._resolve_gguf(path.resolve(), on_progress)
        if path.is_dir():
            check_model_folder(path)
            return path.resolve()
        return self.path_of(value)

    def _resolve_gguf(self, path: Path, on_progress: Progress) -> Path:
        name = slug_of(path.stem)
        status = path.stat()
        source = {"path": str(path), "bytes": status.st_size, "changed_ns": status.st_mtime_ns}
        recorded = self.root / name / "source.json"
        try:
            if json.loads(recorded.read_text(encoding="utf-8")) == source:
                return self.path_of(name)
        except (OSError, ValueError):
            pass
        folder = self.import_path(path, name=name, on_progress=on_progress)
        recorded.write_text(json.dumps(source) + "\n", encoding="utf-8")
        return folder

    @contextmanager
    def _changing(self) -> Iterator[Path]:
        """Hold the store's lock and give a work folder that is gone afterwards."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with (self.root / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                for left_over in self.root.glob(f"{_WORK_PREFIX}*"):
                    # A file of `use` is in its place within a moment.
                    if left_over.is_dir():
                        shutil.rmtree(left_over, ignore_errors=True)
                with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=self.root) as work:
                    yield Path(work)
        except OSError as exc:
            raise self._not_writable(exc) from exc

    def _not_writable(self, exc: OSError) -> ModelStoreError:
        why = exc.strerror or exc
        return ModelStoreError(f"The model store {self.root} cannot be written: {why}.")

    def need_disk(self, num_bytes: int) -> None:
        """
        Raises:
            ModelStoreError: the disk has too little room for so many bytes more.
        """
        free = shutil.disk_usage(self.root).free
        if free < num_bytes + _SPARE_BYTES:
            raise ModelStoreError(
                f"The disk of {self.root} has {free / 1e6:,.0f} MB free; this model needs "
                f"{(num_bytes + _SPARE_BYTES) / 1e6:,.0f} MB. Free some space and try again."
            )

    def _import_gguf(
        self,
        gguf: Path,
        name: str,
        work: Path,
        on_progress: Progress,
        finish: Callable[[Path], None] = lambda folder: None,
    ) -> Path:
        import_gguf(gguf, work / "model", on_progress)
        finish(work / "model")
        replace_folder(work / "model", self.root / name)
        return self.root / name

    def _import_folder(
        self,
        source: Path,
        name: str,
        work: Path,
        on_progress: Progress,
        finish: Callable[[Path], None],
        move: bool,
    ) -> Path:
        if source.resolve() == (self.root / name).resolve():
            raise ModelStoreError(f"{source} is already in the store.")
        weights = check_model_folder(source)
        files = [*(source / plain for plain in _COPIED_FILES), *weights]
        files = [file for file in files if file.is_file()]
        total = sum(file.stat().st_size for file in files)
        if not move:
            self.need_disk(total)
        (work / "model").mkdir()
        copied = 0
        for file in files:
            copied += file.stat().st_size
            if move:
                file.rename(work / "model" / file.name)
            else:
                shutil.copyfile(file, work / "model" / file.name)
            on_progress(copied / total, "taking the files in")
        finish(work / "model")
        replace_folder(work / "model", self.root / name)
        return self.root / name


def _precision(folder: Path, config: ModelConfig) -> str:
    if (folder / GROUPS_FILE).is_file():
        return "quantised, as imported"
    return str(config.raw.get("torch_dtype") or config.raw.get("dtype") or "as stored")


def slug_of(text: str) -> str:
    """A store name from a file's or folder's name: "Qwen2.5 0.5B_it" -> "qwen2.5-0.5b_it"."""
    plain = re.sub(r"[^a-z0-9._-]+", "-", text.lower())[:64]
    return plain.strip("-._") or "model"


def check_servable(folder: Path) -> None:
    """As `check_model_folder`, and whether its architecture is one that can be served.

    Raises:
        ModelLoadError: see there; UnsupportedArchitecture lists what can be served.
    """
    check_model_folder(folder)
    decoder_spec(ModelConfig.from_dir(folder))


def check_model_folder(folder: Path) -> list[Path]:
    """Check that a folder can be served, without reading its weights; returns its weight files.

    Raises:
        ModelLoadError: a file is missing or broken, or the weights are pickled.
    """
    ModelConfig.from_dir(folder)
    weights = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    # The side file alone is no model.
    if not [file for file in weights if file.name != GROUPS_FILE]:
        pickled = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
        why = (
            f"its weights ({pickled[0].name}) are pickled, which could run code; only safetensors "
            "are loaded"
            if pickled
            else "it holds no .safetensors file"
        )
        raise ModelLoadError(f"{folder} cannot be used: {why}.")
    if not (folder / "tokenizer.json").is_file():
        raise ModelLoadError(f"{folder} cannot be used: it holds no tokenizer.json.")
    for file in weights:
        read_header(file)
    return weights
