"""What admins do to the running engine: every act is audited and told to all open consoles."""

import asyncio
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from channels.db import database_sync_to_async

from appliance.accounts.models import User
from appliance.console.event_words import KILLED, SETTING_WORDS, Worded, value_words
from appliance.console.feed import current_feed
from appliance.console.models import AuditRecord
from appliance.console.selectors import settings_version
from appliance.errors import BadRequest, Conflict, NotFound
from appliance.serving.gateway import get_backend
from appliance.serving.live_settings import live_state
from appliance.serving.services import engine_tune

MAX_REQUEST_ID = 100
# As much of an id as pages show.
SHORT_ID = 8

_tuning: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def request_kill(request_id: str, by: User) -> None:
    """End a running or waiting request of anybody. Raises NotFound when it is over already."""
    picture = current_feed().picture
    if len(request_id) > MAX_REQUEST_ID or not get_backend().abort(request_id, KILLED):
        raise NotFound(f"Request {request_id[:MAX_REQUEST_ID]} is not running: it has ended.")
    owner, written = picture.owner_name(request_id), picture.written(request_id)
    await _audit(by, "request.kill", request_id, {"owner": owner, "written_tokens": written})
    after = f" after {written:,} tokens" if written else ""
    text = f"{by.username} killed {owner}'s request {request_id[:SHORT_ID]}{after}."
    current_feed().announce(Worded("warn", "stop", text))


async def engine_change(
    changes: Mapping[str, Any], by: User, *, if_version: str | None = None, why: str = ""
) -> Mapping[str, Any]:
    """Apply live settings; returns the state after it. `why` stands in the history.

    Raises:
        BadRequest: an unknown name or a bad value; nothing was changed.
        Conflict: `if_version` is given and somebody changed the settings meanwhile.
        EngineUnavailable: no engine to change.
    """
    if not changes:
        raise BadRequest('The body names no setting. Send one, for example {"slots": 4}.')
    lock = _tuning.setdefault(asyncio.get_running_loop(), asyncio.Lock())
    # Checking the version and applying are one act.
    async with lock:
        before = live_state(get_backend())
        if if_version is not None and if_version != settings_version(before):
            raise Conflict(
                "Somebody changed the settings meanwhile. Look at the new values and apply again."
            )
        # A look in between may see the engine's own event first.
        current_feed().picture.expect_own_change()
        state = await engine_tune(changes, by)
    # What is as it was, as when one sends all settings, is no act.
    changed = {name: value for name, value in changes.items() if _requested(before, name) != value}
    if not changed:
        return state
    detail = {
        "before": {name: _requested(before, name) for name in changed},
        "after": changed,
        **({"why": why} if why else {}),
    }
    await _audit(by, "engine.tune", ", ".join(sorted(changed))[:200], detail)
    for name, value in changed.items():
        current_feed().announce(_tuned_words(by, name, detail["before"][name], value))
    return state


def _requested(state: Mapping[str, Any], name: str) -> Any:
    setting = state.get("slots") if name == "slots" else (state.get("settings") or {}).get(name)
    return (setting or {}).get("requested")


def _tuned_words(by: User, name: str, before: Any, after: Any) -> Worded:
    what = SETTING_WORDS.get(name, name)
    change = f"{value_words(before)} → {value_words(after)}"
    return Worded("", "info", f"{by.username} changed {what[:1].lower()}{what[1:]}: {change}.")


@database_sync_to_async
def _audit(by: User, action: str, target: str, detail: Mapping[str, Any]) -> None:
    AuditRecord.objects.create(
        actor=by, actor_name=by.username, action=action, target=target, detail=detail
    )
