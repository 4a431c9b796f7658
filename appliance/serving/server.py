"""The running server: loads the engine, says when it is ready, and ends in good order.

Everything here runs on the event loop. At its end: readiness turns red and nothing new is admitted;
what runs may finish within the grace time, what waits is refused; answers are booked; sockets are
closed with 1012 so that pages come back by themselves; the worker ends; the exit status is 0.
When the engine hangs for good the server ends by itself in the same order with status 1, so that a
service manager starts it again: a thread inside a native call cannot be ended in any other way.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Protocol

from django.db import DatabaseError

from appliance.quotas.services import quota_mark_alive
from appliance.serving.backend import Backend
from appliance.serving.booking import bookings_wait, in_db_thread
from appliance.serving.gateway import (
    gateway_close,
    gateway_install,
    gateway_serving,
    gateway_stopping,
)
from appliance.serving.health import readiness
from appliance.serving.web_server import SERVICE_RESTART, WebServer
from appliance.serving.worker_process import WorkerProcess
from appliance.serving.worker_watch import worker_expect

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.1
_ALIVE_EVERY_S = 60.0
_LOST_LOOK_S = 1.0
# After the grace time: for last events, bookings, sockets and the worker.
_FLUSH_S = 3.0
_WATCHDOG_S = 15.0


class ServedBackend(Backend, Protocol):
    """A back end with a life: what the server needs beside the gateway's protocol."""

    def start(self) -> None:
        """Begin to load; returns at once. `state()` tells how it goes."""

    async def stop(self, grace_s: float) -> None:
        """Take nothing new, let what runs finish for `grace_s`, end the rest, free all memory."""

    @property
    def is_lost(self) -> bool:
        """Whether only the end of this process helps: the engine hangs for good."""


class ApplianceServer:
    """One run of the server. `run()` returns the exit status."""

    def __init__(
        self,
        web: WebServer,
        backend: ServedBackend,
        worker: WorkerProcess | None,
        *,
        url: str,
        drain_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._web = web
        self._backend = backend
        self._worker = worker
        self._url = url
        self._drain_s = drain_s
        self._say = say
        # Made before the loop runs; bound to it at the first wait.
        self._stop_asked = asyncio.Event()
        self._exit_status = 0

    def run(self) -> int:
        gateway_install(self._backend)
        self._web.run_with(self._main)
        return self._exit_status

    # ---- the event loop

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            self._backend.start()
            gateway_serving()
            if await self._until_ready():
                await self._until_stop_asked()
            await self._drain()
        except Exception:
            logger.exception("the server failed")
            self._exit_status = 1
        finally:
            if self._worker is not None:
                await asyncio.to_thread(self._worker.stop)
            self._web.stop()

    def _on_signal(self) -> None:
        if self._stop_asked.is_set():
            self._say("Stopped at once.")
            if self._worker is not None:
                self._worker.ask_to_stop()
            os._exit(1)
        gateway_close()
        self._stop_asked.set()

    async def _until_ready(self) -> bool:
        """Say how loading goes. False when it failed or the server was asked to stop."""
        said: set[str] = set()
        while not self._stop_asked.is_set():
            state = self._backend.state()
            if state["state"] == "dead":
                self._say(f"The model cannot be served: {state.get('error')}")
                self._exit_status = 1
                return False
            if (await readiness()).is_ready:
                # What is loaded stays: a full collection over it would hold up every stream.
                gc.collect()
                gc.freeze()
                # Not before: its own start would take a core from the loading model.
                if self._worker is not None:
                    self._worker.start()
                # Also without one of its own: another has to do the work then.
                worker_expect()
                self._say(f"ready: {self._url}")
                return True
            progress, doing = state.get("progress") or (0.0, "")
            # Each once: between the engine's last step and "ready" the first is told again.
            if doing and doing not in said:
                self._say(f"loading: {doing} ({progress:.0%})")
                said.add(doing)
            await self._wait_for_stop(_LOOK_EVERY_S)
        return False

    async def _until_stop_asked(self) -> None:
        loop = asyncio.get_running_loop()
        told_alive_s = loop.time()
        while not self._stop_asked.is_set():
            if self._backend.is_lost:
                self._say(f"Stopping: {self._backend.state().get('error')}")
                self._exit_status = 1
                return
            await self._wait_for_stop(_LOST_LOOK_S)
            if loop.time() - told_alive_s < _ALIVE_EVERY_S:
                continue
            told_alive_s = loop.time()
            if self._worker is not None:
                self._worker.keep_alive()
            with contextlib.suppress(DatabaseError):
                await in_db_thread(quota_mark_alive)

    async def _wait_for_stop(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop_asked.wait(), timeout_s)

    async def _drain(self) -> None:
        gateway_close()
        _leave_at_the_latest(self._drain_s + _WATCHDOG_S, self._exit_status)
        if self._exit_status == 0:
            self._say("Stopping: running answers may finish.")
        if self._worker is not None:
            self._worker.ask_to_stop()
        await self._backend.stop(self._drain_s)
        await gateway_stopping(_FLUSH_S)
        await self._web.responses_wait(_FLUSH_S)
        if left := await bookings_wait(_FLUSH_S):
            logger.error("%s generations could not be booked: the database does not answer", left)
        self._web.close_sockets(SERVICE_RESTART)
        await self._web.sockets_wait(1.0)


def _leave_at_the_latest(after_s: float, status: int) -> None:
    """A thread that hangs (a step, a database) must not keep the process for ever."""

    def leave() -> None:
        logger.error("the server did not end in time and is cut off")
        os._exit(status)

    timer = threading.Timer(after_s, leave)
    timer.daemon = True
    timer.start()
