"""Compiles `csrc/` into one shared library, once for each source text and torch version.

A plain compiler call: no Python headers, no pybind, so a machine needs g++ (or clang++) and nothing
else. Each instruction set is its own object file with its own flags; the library picks one when it
runs. `python -m kernels.build` builds it at install; a later start finds it in the cache.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent / "csrc"
DEFAULT_CACHE_DIR = Path(__file__).parent / "_build"

COMMON_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wno-psabi")
TIMEOUT_S = 600
AVX512_FLAGS = (
    *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vbmi", "-mavx512bf16"),
    *("-mavx2", "-mfma", "-mf16c"),
)
# Flags of the files that are compiled for one instruction set; x86 only.
X86_FLAGS = {
    "isa_avx2.cpp": ("-mavx2", "-mfma", "-mf16c"),
    "isa_avx512.cpp": AVX512_FLAGS,
    "isa_amx.cpp": (*AVX512_FLAGS, "-mamx-tile", "-mamx-bf16"),
}


class BuildFailed(Exception):
    """The library cannot be made here; the message is a plain reason, with the compiler's words."""


def ensure_library(cache_dir: Path = DEFAULT_CACHE_DIR) -> Path:
    """The library's path; compiles it (half a minute on two cores) where the cache has none.

    Safe to call from several processes at once: each builds in a folder of its own and the
    finished library is moved into place. Libraries of older sources are removed.

    Raises:
        BuildFailed: there is no compiler, it reported an error, or the cache cannot be written.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    library = cache_dir / _library_name()
    if library.exists():
        return library
    if compiler is None:
        raise BuildFailed("there is no C++ compiler (g++ or clang++) on this machine")
    started = time.monotonic()
    logger.info("Compiling the native CPU kernels with %s (takes minutes, once).", compiler)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        (cache_dir / ".gitignore").write_text("*\n", encoding="utf-8")
        with tempfile.TemporaryDirectory(dir=cache_dir) as folder:
            built = _compile(compiler, Path(folder))
            built.replace(library)
        for older in cache_dir.glob("libblockhouse_*.so"):
            if older != library:
                older.unlink(missing_ok=True)
    except OSError as exc:
        raise BuildFailed(f"{cache_dir} cannot be written: {exc}") from exc
    logger.info("Compiled %s in %.0f s.", library, time.monotonic() - started)
    return library


def _library_name() -> str:
    digest = hashlib.sha256()
    for text in (torch.__version__, platform.machine(), *COMMON_FLAGS, repr(X86_FLAGS)):
        digest.update(text.encode() + b"\0")
    for path in sorted(SOURCE_DIR.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"libblockhouse_{digest.hexdigest()[:16]}.so"


def _compile(compiler: str, folder: Path) -> Path:
    sources = [
        path
        for path in sorted(SOURCE_DIR.glob("*.cpp"))
        if path.name not in X86_FLAGS or platform.machine() in ("x86_64", "AMD64")
    ]
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        objects = list(pool.map(lambda path: _compile_one(compiler, path, folder), sources))
    library = folder / "library.so"
    torch_lib = Path(torch.__file__).parent / "lib"
    command = [compiler, "-shared", "-fopenmp", "-o", str(library), *map(str, objects)]
    command += [f"-L{torch_lib}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_lib}"]
    _call(command)
    return library


def _compile_one(compiler: str, source: Path, folder: Path) -> Path:
    include = Path(torch.__file__).parent / "include"
    target = folder / f"{source.stem}.o"
    command = [compiler, *COMMON_FLAGS, *X86_FLAGS.get(source.name, ())]
    command += ["-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include")]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    _call([*command, "-c", str(source), "-o", str(target)])
    return target


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise BuildFailed(f"the compiler {command[0]} did not run to its end: {exc}") from exc
    if done.returncode:
        words = done.stderr.strip().splitlines()
        errors = [line for line in words if "error" in line] or words[-1:]
        raise BuildFailed(f"the compiler {command[0]} reported: {' '.join(errors[:3])}")


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        library = ensure_library()
    except BuildFailed as exc:
        logger.warning("The native CPU kernels were not built: %s.", exc)
        logger.warning("The server works without them, several times slower.")
        return 1
    logger.info("The native CPU kernels are ready: %s", library)
    return 0


if __name__ == "__main__":
    sys.exit(main())
