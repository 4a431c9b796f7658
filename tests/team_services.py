"""Pytest plugin: real PostgreSQL and Redis for one run, in temporary folders on free ports.

`pytest -p tests.team_services tests/appliance` runs the same tests on the team default. The
services start before Django reads its settings and stop, by process id, when the run ends.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

_services: list[subprocess.Popen[bytes]] = []
_folders: list[Path] = []


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    try:
        os.environ["DATABASE_URL"] = start_postgresql()
        os.environ["REDIS_URL"] = start_redis()
    except BaseException:
        stop_all()
        raise


def pytest_report_header() -> str:
    return "services: PostgreSQL and Redis, started for this run"


def pytest_unconfigure() -> None:
    stop_all()


def start_postgresql() -> str:
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs:
        raise pytest.UsageError("PostgreSQL is not installed: apt-get install postgresql")
    initdb, postgres = programs[-1] / "initdb", programs[-1] / "postgres"
    folder = new_folder()
    # PostgreSQL refuses to run as root; its package makes this account.
    account = {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}
    if account:
        shutil.chown(folder, "postgres", "postgres")
    subprocess.run(
        [initdb, "-D", folder / "data", "-U", "blockhouse", "-A", "trust", "-E", "UTF8", "-N"],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd=folder,
        **account,
    )
    port = free_port()
    _services.append(
        subprocess.Popen(
            [
                *(postgres, "-D", folder / "data", "-p", str(port), "-k", folder),
                *("-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"),
                *("-c", "max_connections=50"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            **account,
        )
    )
    ready = [programs[-1] / "pg_isready", "-h", "127.0.0.1", "-p", str(port), "-q"]
    wait_until(lambda: subprocess.run(ready, check=False).returncode == 0, "PostgreSQL")
    return f"postgresql://blockhouse@127.0.0.1:{port}/postgres"


def start_redis() -> str:
    port = free_port()
    program = shutil.which("redis-server")
    if program is None:
        raise pytest.UsageError("Redis is not installed: apt-get install redis-server")
    _services.append(
        subprocess.Popen(
            [
                *(program, "--bind", "127.0.0.1", "--port", str(port)),
                *("--save", "", "--dir", str(new_folder())),
            ],
            stdout=subprocess.DEVNULL,
        )
    )

    def answers() -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=1) as connection,
        ):
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
        return False

    wait_until(answers, "Redis")
    return f"redis://127.0.0.1:{port}/0"


def new_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="blockhouse-test-"))
    _folders.append(folder)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(ready: Callable[[], bool], name: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        if any(service.poll() is not None for service in _services):
            raise pytest.UsageError(f"{name} ended while starting")
        if time.monotonic() > deadline:
            raise pytest.UsageError(f"{name} did not answer within {timeout_s:.0f} s")
        time.sleep(0.05)


def stop_all() -> None:
    for service in reversed(_services):
        service.terminate()
        try:
            service.wait(timeout=20)
        except subprocess.TimeoutExpired:
            service.kill()
            service.wait()
    _services.clear()
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)
    _folders.clear()
