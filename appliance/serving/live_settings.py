"""Live settings of the engine and of the chat: applied at once, kept for the next start."""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from django.db import transaction
from django.db.models import F

from appliance.accounts.models import User
from appliance.errors import BadRequest
from appliance.serving.backend import Backend
from appliance.serving.booking import in_db_thread
from appliance.serving.chat_settings import (
    DEFAULTS,
    chat_settings_apply,
    chat_settings_check,
    chat_settings_shown,
)
from appliance.serving.gateway import get_backend
from appliance.serving.models import EngineSetting

logger = logging.getLogger(__name__)

# The engine takes changes over between two steps; a step of a large model can take this long.
_APPLY_WAIT_S = 2.0
_LOOK_EVERY_S = 0.01


async def engine_tune(changes: Mapping[str, Any], by: User | None) -> Mapping[str, Any]:
    """Check and apply all of `changes`, keep them, and return the state that holds then.

    Raises:
        BadRequest: an unknown name or a value out of range; nothing was changed.
        EngineUnavailable: no engine to change.
    """
    backend = get_backend()
    _tune(backend, changes)
    await in_db_thread(_save, dict(changes), by)
    return await _state_with(backend, changes)


def live_state(backend: Backend) -> dict[str, Any]:
    """The back end's state, with the chat's live settings beside the engine's."""
    state = dict(backend.state())
    # An engine that is not there shows none of its own either.
    if engine_settings := state.get("settings"):
        state["settings"] = {**engine_settings, **chat_settings_shown(state.get("model"))}
    return state


def saved_settings() -> dict[str, Any]:
    """Name -> value of what admins chose. Blocking."""
    return dict(EngineSetting.objects.values_list("name", "value"))


def apply_saved(backend: Backend, saved: Mapping[str, Any]) -> None:
    """Tune a starting engine to what was saved; a value that it no longer takes is left out."""
    for name, value in saved.items():
        try:
            _tune(backend, {name: value})
        except BadRequest as exc:
            logger.warning("the saved setting is left out: %s", exc.message)


def _tune(backend: Backend, changes: Mapping[str, Any]) -> None:
    """Apply all of `changes`, or raise BadRequest and apply none."""
    of_chat = {name: value for name, value in changes.items() if name in DEFAULTS}
    of_engine = {name: value for name, value in changes.items() if name not in DEFAULTS}
    chat_settings_check(of_chat)
    if of_engine:
        backend.tune(of_engine)
    chat_settings_apply(of_chat)


def _save(changes: Mapping[str, Any], by: User | None) -> None:
    with transaction.atomic():
        for name, value in changes.items():
            _, is_new = EngineSetting.objects.get_or_create(
                name=name, defaults={"value": value, "changed_by": by}
            )
            if not is_new:
                setting = EngineSetting.objects.select_for_update().get(name=name)
                setting.value, setting.changed_by = value, by
                setting.version = F("version") + 1
                setting.save()


async def _state_with(backend: Backend, changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first state that shows the changes, or the newest when the engine takes too long."""
    deadline = time.monotonic() + _APPLY_WAIT_S
    while True:
        state = live_state(backend)
        shown = {"slots": state.get("slots"), **(state.get("settings") or {})}
        if all(_requested(shown.get(name), value) == value for name, value in changes.items()):
            return state
        if time.monotonic() > deadline:
            return state
        await asyncio.sleep(_LOOK_EVERY_S)


def _requested(setting: Mapping[str, Any] | None, otherwise: Any) -> Any:
    return otherwise if setting is None else setting.get("requested")
