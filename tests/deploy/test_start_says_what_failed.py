"""`deploy/start` on a machine that lacks something says what failed and what to do."""

import os
import subprocess
from pathlib import Path

import pytest

from appliance.serving.start import data_dir_lock
from deploy import launcher

ROOT = Path(__file__).resolve().parents[2]


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", "deploy/start", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_wrong_python(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2" && exit 0\nexit 1\n')
    old.chmod(0o755)
    for tool in ("dirname", "cat"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
    done = start(PATH=str(tmp_path))
    assert done.returncode != 0
    assert "needs Python 3.11" in done.stderr
    assert "Python 3.9.2" in done.stderr
    assert "apt-get install" in done.stderr


def test_data_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    done = start("--data-dir", str(tmp_path / "taken"))
    assert done.returncode != 0
    assert "cannot be written" in done.stderr
    assert "--data-dir" in done.stderr


def test_a_second_start_changes_nothing_under_the_server_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[str] = []
    monkeypatch.setenv("APPLIANCE_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(launcher, "environment_make", lambda extras: changed.append("packages"))
    monkeypatch.setattr(launcher, "kernels_make", lambda: changed.append("kernels"))
    monkeypatch.setattr(launcher, "prepare", lambda: changed.append("tables"))
    refusal = pytest.raises(launcher.StepFailed, match=f"process {os.getpid()}.*already runs")
    with data_dir_lock(tmp_path), refusal:
        launcher.start([])
    assert not changed


def test_unknown_option_is_refused_before_anything_is_done() -> None:
    done = start("--prot", "8001")
    assert done.returncode != 0
    assert "--prot" in done.stderr


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("NewConnectionError: Failed to establish a new connection", "could not be reached"),
        ("ERROR: No matching distribution found for x", "see below"),
    ],
)
def test_reason_of_a_failed_install(log: str, reason: str) -> None:
    assert reason in launcher.pip_reason(log)


def test_too_little_disk_is_said_before_the_download(tmp_path: Path) -> None:
    with pytest.raises(launcher.StepFailed, match="GiB are needed"):
        launcher.require_disk(tmp_path, 2**60)


def test_every_package_is_pinned() -> None:
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in launcher.CONSTRAINTS.read_text(encoding="utf-8").splitlines()
        if "==" in line
    }
    for wanted in launcher.requirements(("test",)):
        name = wanted.split("[")[0].split(">")[0].split("=")[0].split("<")[0].split("~")[0]
        assert name.strip().lower().replace("_", "-") in pinned, wanted


@pytest.mark.parametrize("port", ["0", "-1", "65536"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    done = start("--port", port)
    assert done.returncode != 0
    assert "1 to 65535" in done.stderr


def test_what_a_start_writes_is_for_its_own_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    monkeypatch.setenv("APPLIANCE_DATA_DIR", "")  # put back afterwards: the start sets it
    monkeypatch.setattr(launcher, "environment_make", lambda extras: None)
    monkeypatch.setattr(launcher, "kernels_make", lambda: None)
    monkeypatch.setattr(launcher, "prepare", (folder / "chats.sqlite3").touch)
    monkeypatch.setattr(os, "execv", lambda *serve: None)
    monkeypatch.setattr(os, "chdir", lambda path: None)
    before = os.umask(0o022)
    try:
        launcher.start(["--data-dir", str(folder)])
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / "chats.sqlite3").stat().st_mode & 0o077 == 0
