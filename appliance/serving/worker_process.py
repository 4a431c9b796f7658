"""The one Celery worker beside the server: a process that starts and ends with it."""

import logging
import os
import signal
import subprocess
import sys
import time

from django.conf import settings

logger = logging.getLogger(__name__)

_STDERR = 2
_STOP_WAIT_S = 8.0
# A worker that ends by itself is started again, but not more often than this.
_RESTART_AFTER_S = 30.0


class WorkerProcess:
    """Used from the event loop; only `stop` waits."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        # A session of its own: Ctrl-C in the terminal reaches the server, which ends the worker.
        self._process = subprocess.Popen(
            [
                *(sys.executable, str(settings.BASE_DIR / "manage.py"), "worker"),
                *("--parent", str(os.getpid())),
            ],
            stdin=subprocess.DEVNULL,
            # Standard output is for what the server says at its start.
            stdout=_STDERR,
            start_new_session=True,
        )
        self._started_s = time.monotonic()
        logger.info("background worker started, process %s", self._process.pid)

    def keep_alive(self) -> None:
        """Start it again if it has ended."""
        process = self._process
        if process is None or process.poll() is None:
            return
        if time.monotonic() - self._started_s < _RESTART_AFTER_S:
            return
        logger.error(
            "the background worker ended with status %s; it is started again", process.returncode
        )
        self.start()

    def ask_to_stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self, wait_s: float = _STOP_WAIT_S) -> None:
        """End it; blocks for at most `wait_s`."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            logger.warning("the background worker did not end in time and is killed")
            process.kill()
            process.wait()
