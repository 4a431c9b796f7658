"""Changing the model of the running server."""

from collections.abc import Callable
from pathlib import Path

from django.conf import settings

from appliance.errors import ApplianceError
from appliance.serving.gateway import get_admitting_backend
from appliance.serving.model_store import model_folder, model_use
from inference.errors import ModelLoadError


def model_swap(name: str) -> None:
    """Begin to serve a stored model in the place of the loaded one; the state's `swap` tells how it
    goes. Running answers get APPLIANCE_DRAIN_SECONDS.

    Raises:
        NotFound, BadRequest: there is no such model, or it cannot be served. Blocking.
        Conflict: another change is under way, or the engine is not in a state for one.
        EngineUnavailable: no engine, or the server stops.
    """
    backend = get_admitting_backend()
    model_folder(name)
    backend.swap_model(
        name,
        lambda report: _folder_again(name),
        drain_s=settings.APPLIANCE_DRAIN_SECONDS,
        on_loaded=_chooser(name),
    )


def swap_is_for_this_run_only() -> str:
    """Why the next start may serve another model; "" when it serves the one that was loaded."""
    if not settings.APPLIANCE_MODEL:
        return ""
    return (
        f"APPLIANCE_MODEL is set to {settings.APPLIANCE_MODEL}, which the next start serves again; "
        "unset it for this choice to last."
    )


def _folder_again(name: str) -> Path:
    """Looked at again by the thread that loads it: it may have gone meanwhile."""
    try:
        return model_folder(name)
    except ApplianceError as exc:
        raise ModelLoadError(exc.message) from exc


def _chooser(name: str) -> Callable[[], None]:
    return lambda: model_use(name)
