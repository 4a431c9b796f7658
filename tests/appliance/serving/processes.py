"""Run the product's own commands and servers as processes, each on a data folder of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import httpx

from tests.e2e.server import ROOT, free_port

# Far more than it takes, so that a busy machine fails nothing.
WAIT_S = 240


def environment(data_dir, **changes):
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("APPLIANCE_") and name not in ("DATABASE_URL", "REDIS_URL")
    }
    return {
        **kept,
        "APPLIANCE_DATA_DIR": str(data_dir),
        "DJANGO_SETTINGS_MODULE": "appliance.settings",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(ROOT),
        **changes,
    }


def run_python(data_dir, *arguments, **changes):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(data_dir, **changes),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def manage(data_dir, *arguments, **changes):
    return run_python(data_dir, "manage.py", *arguments, **changes)


def make_data_dir(folder):
    """Migrate a new data folder: copy it for each test."""
    code = (
        "import django; django.setup();"
        "from django.core.management import call_command;"
        "call_command('migrate', verbosity=0)"
    )
    done = run_python(folder, "-c", code)
    assert done.returncode == 0, done.stderr
    return folder


class Running:
    """A server process on a free port; its standard output is read line by line."""

    def __init__(self, data_dir, command, **changes):
        self.data_dir, self.port = data_dir, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.lines = []
        self.process = subprocess.Popen(
            [sys.executable, *(part.format(port=self.port) for part in command)],
            cwd=ROOT,
            env=environment(data_dir, **changes),
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self):
        self.lines.append(self.process.stdout.readline().strip())
        return self.lines[-1]

    def until_ready(self):
        while (line := self.line()) and not line.startswith("ready: "):
            pass
        assert line, f"it ended before it was ready: {self.lines}"
        return self

    def do(self, name):
        """Tell the scripted back end to go on."""
        (self.data_dir / name).touch()

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def get(self, path, **options):
        return httpx.get(self.url + path, timeout=WAIT_S, **options)

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def until(claim):
    """Poll with a deadline."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if claim():
                return
        time.sleep(0.02)
    raise AssertionError("it never came true")
