"""Where the product finds its back end: one a process, installed by `serve` or by a test."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from appliance.errors import EngineUnavailable
from appliance.serving.backend import Backend

logger = logging.getLogger(__name__)

_backend: Backend | None = None
_admitting = True
_when_serving: list[Callable[[], None]] = []
_when_stopping: list[Callable[[], Coroutine[Any, Any, None]]] = []


def gateway_when_serving(start: Callable[[], None]) -> None:
    """Have `start` called on the event loop once a server runs there."""
    _when_serving.append(start)


def gateway_serving() -> None:
    """The server runs: start what registered for it. Called on the event loop, once."""
    for start in _when_serving:
        start()


def gateway_when_stopping(finish: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Have `finish` run on the event loop when the last generation has ended, before the process
    does: for what must still be stored."""
    _when_stopping.append(finish)


async def gateway_stopping(timeout_s: float) -> None:
    """The generations have ended: let what registered for it finish."""
    tasks = [asyncio.ensure_future(finish()) for finish in _when_stopping]
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=timeout_s)
        if late:
            logger.error("%d parts of the server did not finish in time", len(late))


def gateway_install(backend: Backend) -> None:
    """Make `backend` the one that serves, and admit new generations."""
    global _backend, _admitting
    _backend = backend
    _admitting = True


def gateway_remove() -> None:
    global _backend, _admitting
    _backend = None
    _admitting = True


def gateway_close() -> None:
    """Admit no new generations from now on; running ones and the console go on."""
    global _admitting
    _admitting = False


def gateway_is_admitting() -> bool:
    return _admitting


def get_backend() -> Backend:
    """The installed back end, whatever its state.

    Raises:
        EngineUnavailable: this process serves no model.
    """
    if _backend is None:
        raise EngineUnavailable("No model is served here. Start the server with manage.py serve.")
    return _backend


def get_admitting_backend() -> Backend:
    """The back end for a new generation. Raises EngineUnavailable also while the server stops."""
    backend = get_backend()
    if not _admitting:
        raise EngineUnavailable("The server is stopping. Try again in a minute.", retry_after_s=30)
    return backend
