"""Building the compiled kernels: once, whole or not at all, and a plain reason when it cannot."""

import shutil
from pathlib import Path

import pytest

from kernels import build


@pytest.fixture
def tiny_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source folder that compiles at once, in place of the real one."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "one.cpp").write_text("int one() { return 1; }\n", encoding="utf-8")
    monkeypatch.setattr(build, "SOURCE_DIR", folder)
    return folder


def test_the_library_is_compiled_once_for_a_source_text(tiny_source, tmp_path) -> None:
    first = build.ensure_library(tmp_path / "cache")
    stamp = first.stat().st_mtime_ns
    assert build.ensure_library(tmp_path / "cache") == first
    assert first.stat().st_mtime_ns == stamp
    (tiny_source / "one.cpp").write_text("int one() { return 2; }\n", encoding="utf-8")
    assert build.ensure_library(tmp_path / "cache") != first
    assert not first.exists(), "one library is kept"


def test_nothing_but_the_library_is_left_in_the_cache(tiny_source, tmp_path) -> None:
    library = build.ensure_library(tmp_path / "cache")
    left = {path.name for path in (tmp_path / "cache").iterdir()}
    assert left == {library.name, ".gitignore"}


def test_a_machine_without_a_compiler_gets_a_reason(tiny_source, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(build.BuildFailed, match="no C\\+\\+ compiler"):
        build.ensure_library(tmp_path / "cache")


def test_a_compiler_error_is_told_and_leaves_nothing(tiny_source, tmp_path) -> None:
    (tiny_source / "two.cpp").write_text("int two() { return nothing; }\n", encoding="utf-8")
    with pytest.raises(build.BuildFailed, match=r"two\.cpp.*error.*nothing"):
        build.ensure_library(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".gitignore"]


def test_a_cache_that_cannot_be_written_gets_a_reason(tiny_source, tmp_path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder", encoding="utf-8")
    with pytest.raises(build.BuildFailed, match="cannot be written"):
        build.ensure_library(tmp_path / "cache")


def test_files_for_an_instruction_set_include_no_shared_inline_code() -> None:
    # A torch header or container here would put AVX-512 code into functions that others share.
    allowed = {"<cstdint>", "<cstring>", "<immintrin.h>"}
    pending = sorted(build.SOURCE_DIR.glob("isa_*.cpp"))
    assert len(pending) >= 3
    seen = set(pending)
    while pending:
        for line in pending.pop().read_text(encoding="utf-8").splitlines():
            if not line.startswith("#include"):
                continue
            name = line.split()[1]
            if name.startswith('"'):
                header = build.SOURCE_DIR / name.strip('"')
                if header not in seen:
                    seen.add(header)
                    pending.append(header)
            else:
                assert name in allowed, f"{line} in a file for one instruction set"
