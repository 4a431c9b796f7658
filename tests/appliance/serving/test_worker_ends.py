"""D06: a worker never outlives its server, not even one that was killed while it started; and it
starts on what a full disk left (D12)."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from appliance.serving.broker_files import broker_mend

ROOT = Path(__file__).resolve().parents[3]


def embedded(data_dir: Path) -> dict[str, str]:
    """Settings of a worker that keeps all it has in one folder, whatever this run's own are."""
    return {
        **os.environ,
        "APPLIANCE_DATA_DIR": str(data_dir),
        "DATABASE_URL": "",
        "REDIS_URL": "",
    }


def test_a_worker_whose_server_is_gone_ends(data_dir: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    worker = subprocess.run(
        [sys.executable, "manage.py", "worker", "--parent", str(gone.pid)],
        cwd=ROOT,
        env=embedded(data_dir),
        capture_output=True,
        timeout=60,
        check=False,
    )
    # An orderly end or the signal itself: it never waits for a server that is not there.
    assert worker.returncode in (0, -signal.SIGTERM), worker.stderr


def test_the_clock_of_a_worker_that_is_killed_ends(data_dir: Path) -> None:
    worker = subprocess.Popen(
        [sys.executable, "manage.py", "worker", "--parent", str(os.getpid())],
        cwd=ROOT,
        env=embedded(data_dir),
    )
    ends_at = time.monotonic() + 60
    clocks: list[psutil.Process] = []
    while not clocks and worker.poll() is None and time.monotonic() < ends_at:
        time.sleep(0.1)
        clocks = psutil.Process(worker.pid).children()
    worker.kill()
    worker.wait()
    assert clocks
    left = psutil.wait_procs(clocks, timeout=60)[1]
    for clock in left:
        clock.kill()
    assert not left


@pytest.mark.parametrize("torn", [b"", b'[["celery", "", "cel', b"\xff"])
@pytest.mark.parametrize("kind", ["exchange", "celery.msg"])
def test_only_a_broken_file_of_the_broker_is_removed_d12(
    torn: bytes, kind: str, tmp_path: Path
) -> None:
    whole, broken = tmp_path / f"1_whole.{kind}", tmp_path / f"2_broken.{kind}"
    whole.write_text('[["celery", "", "celery"]]')
    broken.write_bytes(torn)
    broker_mend(tmp_path, tmp_path)
    assert (whole.exists(), broken.exists()) == (True, False)
    broker_mend(tmp_path / "there is none", tmp_path / "nor here")


def test_a_worker_starts_on_a_broker_that_a_full_disk_left_torn_d12(data_dir: Path) -> None:
    table = data_dir / "broker" / "control" / "celery.exchange"
    table.parent.mkdir(parents=True)
    table.write_bytes(b"")
    worker = subprocess.Popen(
        [sys.executable, "manage.py", "worker", "--parent", str(os.getpid())],
        cwd=ROOT,
        env=embedded(data_dir),
        stderr=subprocess.PIPE,
    )
    ends_at = time.monotonic() + 60
    while worker.poll() is None and not _is_whole(table) and time.monotonic() < ends_at:
        time.sleep(0.1)
    worker.terminate()
    said = worker.communicate(timeout=60)[1]
    assert _is_whole(table), said


def _is_whole(table: Path) -> bool:
    try:
        return bool(json.loads(table.read_bytes()))
    except (FileNotFoundError, ValueError):
        return False
