"""D06: a worker never outlives its server, not even one that was killed while it started."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_a_worker_whose_server_is_gone_ends(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    worker = subprocess.run(
        [sys.executable, "manage.py", "worker", "--parent", str(gone.pid)],
        cwd=ROOT,
        env={**os.environ, "APPLIANCE_DATA_DIR": str(tmp_path)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    # An orderly end or the signal itself: it never waits for a server that is not there.
    assert worker.returncode in (0, -signal.SIGTERM), worker.stderr
