"""The simulated server as a process of its own, for a browser. Imports no Django."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


class Server:
    """`options` are those of `simulated_server`."""

    def __init__(self, data_dir: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.appliance.console.simulated_server", str(port), *options],
            cwd=ROOT,
            env={**os.environ, "APPLIANCE_DATA_DIR": str(data_dir), "DATABASE_URL": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert json.loads(self.process.stdout.readline())["listening"] == port

    def set_state(self, state: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{state}\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=30)
