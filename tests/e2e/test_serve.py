"""One server a data folder, two folders side by side, an orderly end."""

import subprocess
import sys
from pathlib import Path

import httpx

from tests.e2e.server import ROOT, Server


def test_a_second_start_on_the_same_data_folder_is_refused(server: Server) -> None:
    second = subprocess.run(
        [sys.executable, "manage.py", "serve", "--port", "0"],
        cwd=ROOT,
        env=server.env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode != 0
    assert str(server.data_dir) in second.stderr + second.stdout


def test_two_data_folders_run_side_by_side_and_end_in_order(
    server: Server, bundled_model_dir: Path, tmp_path: Path
) -> None:
    other = Server(tmp_path / "other", bundled_model_dir).start()
    try:
        assert httpx.get(f"{other.url}/readyz", timeout=60).status_code == 200
        assert httpx.get(f"{server.url}/readyz", timeout=60).status_code == 200
    finally:
        assert other.stop() == 0
    assert httpx.get(f"{server.url}/healthz", timeout=60).status_code == 200
