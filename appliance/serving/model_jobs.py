"""Fetching and importing models beside the running server: one at a time, in a process of its own.

It is the command `manage.py models`: reading and rewriting gigabytes would take the interpreter
from the streams. The process ends with the server, since its progress has nobody left to read it;
what it had not finished is left out of the store, and a download goes on where it was.
"""

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from django.conf import settings

from appliance.errors import Conflict, NotFound

logger = logging.getLogger(__name__)

_STOP_WAIT_S = 5.0
_MOST_SAID = 600


@dataclass(frozen=True, slots=True)
class ModelJob:
    """The newest job, under way or ended."""

    # pull or import
    kind: str
    # The name, repository or path that was asked for.
    target: str
    began_at: float
    # running, done, failed or stopped
    state: str = "running"
    share: float = 0.0
    doing: str = "starting"
    # What it said at its end.
    said: str = ""
    # What it said before it began: whether the model fits.
    note: str = ""
    ended_at: float | None = None

    @property
    def is_running(self) -> bool:
        return self.state == "running"

    @property
    def percent(self) -> int:
        return round(100 * self.share)


class ModelJobs:
    """Used from any thread."""

    def __init__(self) -> None:
        self.job: ModelJob | None = None
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def start(self, kind: str, target: str, arguments: list[str]) -> None:
        """Run `manage.py models KIND ARGUMENTS`.

        Raises:
            Conflict: another job is under way.
        """
        with self._lock:
            if self.job is not None and self.job.is_running:
                raise Conflict(
                    f"The server is busy with {self.job.target} already. Wait for its end, or stop "
                    "it."
                )
            self.job = ModelJob(kind, target, time.time())
            self._process = process = subprocess.Popen(
                [
                    *(sys.executable, str(settings.BASE_DIR / "manage.py"), "models", kind),
                    *("--every-percent", "--", *arguments),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        threading.Thread(
            target=self._follow, args=(process,), name="model-job", daemon=True
        ).start()

    def stop(self) -> None:
        """End the job that is under way. Raises NotFound when there is none."""
        with self._lock:
            job, process = self.job, self._process
            if job is None or not job.is_running or process is None:
                raise NotFound("Nothing is being fetched or imported now.")
            self.job = replace(
                job,
                state="stopped",
                said="Stopped. What was fetched is kept.",
                ended_at=time.time(),
            )
        process.terminate()
        try:
            process.wait(_STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()

    def forget(self) -> None:
        """Drop what the last job said; one that is under way goes on."""
        with self._lock:
            if self.job is not None and not self.job.is_running:
                self.job = None

    def _follow(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None, "its output is read"
        said: list[str] = []
        with process.stdout as lines:
            for line in lines:
                self._on_line(line.strip(), said)
        status = process.wait()
        text = (" ".join(said[-3:]) if said else "").removeprefix("CommandError: ")[:_MOST_SAID]
        if status:
            logger.warning("a model could not be had: %s", text)
        self._update(
            lambda job: replace(
                job,
                state="failed" if status else "done",
                share=job.share if status else 1.0,
                said=text or f"The command ended with status {status}.",
                ended_at=time.time(),
            )
        )

    def _on_line(self, line: str, said: list[str]) -> None:
        percent, _, doing = line.partition("% ")
        if doing and percent.isdecimal():
            share = min(int(percent), 100) / 100
            self._update(lambda job: replace(job, share=share, doing=doing[:200]))
        elif line.startswith("note: "):
            self._update(lambda job: replace(job, note=line.removeprefix("note: ")[:_MOST_SAID]))
        elif line:
            said.append(line)

    def _update(self, change: Callable[[ModelJob], ModelJob]) -> None:
        with self._lock:
            if self.job is not None and self.job.is_running:
                self.job = change(self.job)


model_jobs = ModelJobs()
