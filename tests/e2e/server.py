"""A real `manage.py serve` on a free port with a data folder of its own, driven from outside."""

import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """Start with `start()`; `stop()` ends it by process id and returns the exit status."""

    data_dir: Path
    model_dir: Path
    port: int = field(default_factory=free_port)
    environment: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None
    _seen: "queue.Queue[str]" = field(default_factory=queue.Queue)
    _reader: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def env(self) -> dict[str, str]:
        return {
            **os.environ,
            "APPLIANCE_DATA_DIR": str(self.data_dir),
            "APPLIANCE_MODEL": str(self.model_dir),
            "PYTHONUNBUFFERED": "1",
            **self.environment,
        }

    def manage(self, *arguments: str) -> str:
        """Run a manage.py command on this server's data folder; its standard output."""
        done = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=ROOT,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self) -> "Server":
        self.manage("migrate", "--noinput", "-v", "0")
        self.process = subprocess.Popen(
            [sys.executable, "manage.py", "serve", "--port", str(self.port)],
            cwd=ROOT,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.wait_for_line(r"^ready: ")
        except AssertionError:
            # Nobody else has a handle on it yet.
            self.stop()
            raise
        return self

    def _read(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._seen.put(line.rstrip("\n"))

    def wait_for_line(self, pattern: str, timeout_s: float = 120) -> re.Match[str]:
        for line in self.lines:
            if match := re.search(pattern, line):
                return match
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                line = self._seen.get(timeout=0.5)
            except queue.Empty:
                assert self.process is not None
                if self.process.poll() is not None:
                    break
                continue
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"no line like {pattern!r} in:\n" + "\n".join(self.lines))

    def stop(self, timeout_s: float = 60) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            assert self._reader is not None
            self._reader.join(10)
            if self.process.stdout is not None:
                self.process.stdout.close()
