"""What the console reads: users' marks, and the version of the engine's settings."""

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import orjson
from channels.db import database_sync_to_async

from appliance.accounts.models import User
from appliance.console.event_words import SETTING_WORDS, value_words
from appliance.console.models import AuditRecord

# Shown for an owner that is no user of this server (any more).
NO_MARK = [0, 0]
SHOWN_CHANGES = 30


async def users_by_owner(owners: Collection[str]) -> dict[str, list[Any]]:
    """Name, hue and shape of each owner of requests; an owner is a user's id as text."""
    return await _users_by_owner(owners)


@database_sync_to_async
def _users_by_owner(owners: Collection[str]) -> dict[str, list[Any]]:
    ids = [int(owner) for owner in owners if owner.isascii() and owner.isdigit()]
    known = {
        str(pk): [name, hue, shape]
        for pk, name, hue, shape in User.objects.filter(pk__in=ids).values_list(
            "pk", "username", "mark_hue", "mark_shape"
        )
    }
    return {owner: known.get(owner, [owner, *NO_MARK]) for owner in owners}


def settings_version(state: Mapping[str, Any]) -> str:
    """Changes exactly when somebody asks for other settings; compared before a change is applied.

    Made from the requested values, so it is the same after a restart and however they were set.
    """
    asked = {name: setting["requested"] for name, setting in (state.get("settings") or {}).items()}
    slots = state.get("slots") or {}
    asked["slots"] = slots.get("requested")
    return hashlib.sha256(orjson.dumps(asked, option=orjson.OPT_SORT_KEYS)).hexdigest()[:12]


@database_sync_to_async
def changes_made() -> list[dict[str, Any]]:
    """The newest changes of settings: when, who, what in words, and what takes each back."""
    records = AuditRecord.objects.filter(action="engine.tune")[:SHOWN_CHANGES]
    return [
        {
            "at": record.at,
            "who": record.actor_name,
            "words": "; ".join(
                f"{SETTING_WORDS.get(name, name)} {value_words(record.detail['before'][name])}"
                f" → {value_words(after)}"
                for name, after in record.detail["after"].items()
            ),
            # None where the engine did not tell what held before, as while it loads.
            "back": (
                None
                if None in record.detail["before"].values()
                else orjson.dumps(record.detail["before"]).decode()
            ),
        }
        for record in records
    ]
