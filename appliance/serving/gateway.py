"""Where the product finds its back end: one a process, installed by `serve` or by a test."""

from collections.abc import Callable

from appliance.errors import EngineUnavailable
from appliance.serving.backend import Backend

_backend: Backend | None = None
_admitting = True
_when_serving: list[Callable[[], None]] = []


def gateway_when_serving(start: Callable[[], None]) -> None:
    """Have `start` called on the event loop once a server runs there."""
    _when_serving.append(start)


def gateway_serving() -> None:
    """The server runs: start what registered for it. Called on the event loop, once."""
    for start in _when_serving:
        start()


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
