"""Models of a Hugging Face hub: what a repository holds, and fetching what is needed. No torch.

Only weights (safetensors or one GGUF file), configuration, tokenizer and templates are ever asked
for: no pickle and no code. A revision is pinned to its commit before anything is fetched, and each
file is checked against the size, and where the hub has it the SHA-256, that the commit names.
`huggingface_hub` speaks the protocol; it is imported when it is used.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from inference.config import ModelConfig
from inference.errors import ModelLoadError
from inference.models.registry import decoder_spec, refuse_quantised

Progress = Callable[[float, str], None]

# org/model, org/model@revision, org/model:file.gguf, and both.
_REFERENCE = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})"
    r"(?:@(?P<revision>[A-Za-z0-9][\w./-]{0,99}))?"
    r"(?::(?P<file>[A-Za-z0-9][\w./ -]{0,199}\.gguf))?",
    re.ASCII,
)
_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CONFIG_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)
_MAX_CONFIG_BYTES = 200_000_000
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_TIMEOUT_S = 20.0
_SIXTEEN_BITS = 2
_STORED_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_GGUF_BITS = re.compile(r"(?:^|[-_.])(?:I?Q(?P<bits>\d)|(?P<float>BF16|F16|F32))", re.IGNORECASE)


class HubError(ModelLoadError):
    """A model of the hub cannot be had; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class HubReference:
    repo: str
    revision: str | None
    file: str | None


@dataclass(frozen=True, slots=True)
class HubFile:
    path: str
    num_bytes: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class HubModel:
    """What would be fetched of one commit."""

    repo: str
    commit: str
    files: tuple[HubFile, ...]
    # The one GGUF file among them, for a model that has to be imported.
    gguf: str | None

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def weight_bytes(self, config: ModelConfig | None) -> int:
        """About what the weights take in memory, from the sizes of their files."""
        weights = [f for f in self.files if f.path.endswith((".safetensors", ".gguf"))]
        stored = sum(file.num_bytes for file in weights)
        if self.gguf is not None:
            # Sixteen bits a number, and the quantised groups beside them.
            return int(stored * 16 / _gguf_bits(self.gguf)) + stored
        raw = {} if config is None else config.raw
        dtype = str(raw.get("torch_dtype") or raw.get("dtype") or "bfloat16")
        return stored * _SIXTEEN_BITS // _STORED_BYTES.get(dtype, _SIXTEEN_BITS)


def parse_reference(text: str) -> HubReference | None:
    """None when it is no name of a repository."""
    found = _REFERENCE.fullmatch(text)
    if found is None or ".." in text:
        return None
    return HubReference(found["repo"], found["revision"], found["file"])


class Hub:
    """One hub, with the token that it knows us by."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self._url = url.rstrip("/")
        # False, or the library would look for a token of its own.
        self._token: str | bool = token or False

    def look(self, reference: HubReference) -> HubModel:
        """What the repository holds, at the commit that the revision means now.

        Raises:
            HubError: it is not there, not for us, or holds nothing that can be served.
        """
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self._url, token=self._token)
        found: Any = self._asked(
            reference.repo,
            lambda: api.model_info(
                reference.repo,
                revision=reference.revision,
                files_metadata=True,
                timeout=_TIMEOUT_S,
            ),
        )
        commit = str(found.sha or "")
        if not _COMMIT.fullmatch(commit):
            raise HubError(f"{self._url} names no commit of {reference.repo}.")
        files = [_file(sibling) for sibling in found.siblings or ()]
        return _chosen(reference, commit, files)

    def config_of(self, model: HubModel, folder: Path) -> ModelConfig | None:
        """Fetch the configuration and check that such a model can be served.

        None for a GGUF file without one beside it.

        Raises:
            HubError, ModelLoadError: it cannot be served, or not be fetched.
        """
        config_file = next((file for file in model.files if file.path == "config.json"), None)
        if config_file is None:
            return None
        self._fetch_file(model, config_file, folder, lambda num_bytes: None)
        config = ModelConfig.from_dir(folder)
        decoder_spec(config)
        refuse_quantised(config)
        return config

    def fetch(self, model: HubModel, folder: Path, on_progress: Progress) -> None:
        """Fetch all files into `folder`; what an earlier try left there is gone on with.

        Raises:
            HubError: the connection broke or a file is not what the commit says.
        """
        total, done = model.num_bytes, 0
        for file in model.files:
            so_far = done

            def tell(num_bytes: int, file: HubFile = file, so_far: int = so_far) -> None:
                have = min(so_far + num_bytes, total)
                size = f"{have / 1e6:,.0f} of {total / 1e6:,.0f} MB"
                on_progress(have / max(total, 1), f"fetching {file.path}, {size}")

            self._fetch_file(model, file, folder, tell)
            done += file.num_bytes
            tell(file.num_bytes)

    def _fetch_file(
        self, model: HubModel, file: HubFile, folder: Path, tell: Callable[[int], None]
    ) -> None:
        target = folder / Path(file.path).name
        if target.is_file() and target.stat().st_size == file.num_bytes:
            return
        part = target.with_name(target.name + ".part")
        self._asked(model.repo, lambda: self._download(model, file, part, tell))
        if part.stat().st_size != file.num_bytes:
            got = part.stat().st_size
            part.unlink()
            raise HubError(
                f"{file.path} of {model.repo} has {got:,} bytes; its commit says "
                f"{file.num_bytes:,}. Try again."
            )
        if file.sha256 is not None and _sha256(part) != file.sha256:
            part.unlink()
            raise HubError(
                f"{file.path} of {model.repo} is not what its commit says: its digest differs. "
                "Try again."
            )
        part.rename(target)

    def _download(
        self, model: HubModel, file: HubFile, part: Path, tell: Callable[[int], None]
    ) -> None:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers

        url = hf_hub_url(model.repo, file.path, revision=model.commit, endpoint=self._url)
        found = get_hf_file_metadata(url, token=self._token, timeout=_TIMEOUT_S)
        if found.commit_hash != model.commit:
            raise HubError(f"{self._url} gave another commit of {model.repo} than was asked for.")
        headers = build_hf_headers(token=self._token)
        if urlsplit(found.location).netloc != urlsplit(self._url).netloc:
            # Our token is none of another host's business.
            headers.pop("authorization", None)
        with part.open("ab") as opened:
            if opened.tell() > file.num_bytes:
                opened.truncate(0)
            tell(opened.tell())
            http_get(
                found.location,
                opened,
                resume_size=opened.tell(),
                headers=headers,
                expected_size=file.num_bytes,
                tqdm_class=_bar(tell),
            )

    def _asked(self, repo: str, ask: Callable[[], Any]) -> Any:
        """Do it; the library's errors in words for people."""
        from huggingface_hub import errors
        from huggingface_hub.utils import logging as hub_logging

        # What goes wrong is raised; its own lines would stand among ours.
        hub_logging.set_verbosity_error()
        try:
            return ask()
        except ModelLoadError:
            raise
        except errors.GatedRepoError as exc:
            raise HubError(
                f"{repo} asks for its terms to be accepted. Accept them on {self._url}/{repo} and "
                "put the token of that account into the file that APPLIANCE_HUB_TOKEN_FILE names."
            ) from exc
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as exc:
            raise HubError(
                f"{self._url} has no such model or revision of {repo}, or it is private. Check the "
                "name; for a private one set APPLIANCE_HUB_TOKEN_FILE."
            ) from exc
        except (errors.HfHubHTTPError, errors.HFValidationError, OSError, ValueError) as exc:
            why = str(exc).strip().partition("\n")[0][:300] or type(exc).__name__
            raise HubError(
                f"{repo} could not be fetched from {self._url}: {why} Check the network and try "
                "again; what was fetched is kept."
            ) from exc
        except Exception as exc:
            # The library's HTTP client has a tree of errors of its own.
            if not type(exc).__module__.startswith(("httpx", "httpcore")):
                raise
            raise HubError(
                f"{self._url} does not answer: {type(exc).__name__}. Check the network and "
                "APPLIANCE_HUB_URL, and try again; what was fetched is kept."
            ) from exc


def _file(sibling: Any) -> HubFile:
    lfs = sibling.lfs
    sha256 = None if lfs is None else str(lfs["sha256"])
    return HubFile(str(sibling.rfilename), int(sibling.size or 0), sha256)


def _chosen(reference: HubReference, commit: str, files: Sequence[HubFile]) -> HubModel:
    """The files that are needed, or why there are none."""
    top = {file.path: file for file in files if "/" not in file.path}
    configs = [top[name] for name in _CONFIG_FILES if name in top and top[name].num_bytes > 0]
    too_large = [file.path for file in configs if file.num_bytes > _MAX_CONFIG_BYTES]
    if too_large:
        raise HubError(f"{reference.repo} has an absurdly large {too_large[0]}.")
    shards = [file for path, file in top.items() if _SHARD.fullmatch(path)]
    ggufs = {file.path: file for file in files if file.path.endswith(".gguf")}
    if reference.file is not None or not shards:
        gguf = _chosen_gguf(reference, ggufs, files)
        # Everything stands in the file itself; a configuration beside it tells of it beforehand.
        beside = [file for file in configs if file.path == "config.json"]
        return HubModel(reference.repo, commit, (*beside, gguf), gguf.path)
    missing = [name for name in ("config.json", "tokenizer.json") if name not in top]
    if missing:
        raise HubError(f"{reference.repo} cannot be served: it has no {' and no '.join(missing)}.")
    return HubModel(reference.repo, commit, (*configs, *shards), None)


def _chosen_gguf(
    reference: HubReference, ggufs: dict[str, HubFile], files: Sequence[HubFile]
) -> HubFile:
    repo, wanted = reference.repo, reference.file
    if wanted is not None and wanted in ggufs:
        return ggufs[wanted]
    listed = ", ".join(sorted(ggufs)[:20])
    if wanted is not None:
        raise HubError(f"{repo} has no file {wanted}. It has {listed or 'no GGUF file'}.")
    if len(ggufs) == 1:
        return next(iter(ggufs.values()))
    if ggufs:
        raise HubError(f"{repo} has several GGUF files. Name one, as {repo}:FILE, of {listed}.")
    if any(file.path.endswith(_PICKLES) for file in files):
        raise HubError(
            f"{repo} cannot be served: its weights are pickled, which could run code. Take a "
            "repository with safetensors or GGUF."
        )
    raise HubError(f"{repo} holds no weights that can be served: neither safetensors nor GGUF.")


def _gguf_bits(path: str) -> float:
    found = _GGUF_BITS.search(Path(path).stem)
    if found is None:
        return 8.5
    if found["float"]:
        return 32.0 if found["float"].upper() == "F32" else 16.0
    # A group's scale takes half a bit a number.
    return int(found["bits"]) + 0.5


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _bar(tell: Callable[[int], None]) -> Any:
    """The library counts its bytes on a progress bar of this class."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._count = int(options.get("initial") or 0)
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self._count += int(n or 0)
            tell(self._count)

    return Bar


def write_origin(folder: Path, model: HubModel) -> None:
    """Keep beside a stored model where it came from."""
    origin = {"repo": model.repo, "commit": model.commit, "gguf": model.gguf}
    (folder / "origin.json").write_text(json.dumps(origin) + "\n", encoding="utf-8")


def has_origin(folder: Path, model: HubModel) -> bool:
    """Whether the stored model is this one."""
    try:
        found = json.loads((folder / "origin.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(found == {"repo": model.repo, "commit": model.commit, "gguf": model.gguf})
