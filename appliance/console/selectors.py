"""What the console reads: users' marks, and the version of the engine's settings."""

import hashlib
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any

import orjson
from channels.db import database_sync_to_async
from django.conf import settings

from appliance.accounts.models import User
from appliance.console.event_words import SETTING_WORDS, value_words
from appliance.console.models import AuditRecord
from appliance.console.replay import LAST_S, MAX_REQUESTS, Past
from appliance.quotas.models import UsageRecord

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
        str(user.pk): [user.shown_name, user.mark_hue, user.mark_shape]
        for user in User.objects.filter(pk__in=ids)
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
    """The newest changes of settings: when, who, what in words, why, and what takes each back."""
    records = AuditRecord.objects.filter(action="engine.tune")[:SHOWN_CHANGES]
    return [
        {
            "at": record.at,
            "who": record.actor_name,
            "why": record.detail.get("why", ""),
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


def ledger_requests(epoch: float, now: float, known: Collection[str]) -> list[Past]:
    """The last hour's requests of the ledger but those `known`, for the replay. Blocking.

    Times are seconds since `epoch` (unix seconds), as the live picture has them.
    """
    begin = datetime.fromtimestamp(epoch + now - LAST_S, UTC)
    rows = UsageRecord.objects.filter(created_at__gte=begin).order_by("-created_at")
    found = []
    for row in rows[:MAX_REQUESTS]:
        took = row.duration_s - row.queue_s
        if took <= 0 or row.request_id in known:
            continue
        came = row.created_at.timestamp() - epoch - row.duration_s
        found.append(
            Past(
                came,
                took,
                row.source == "chat",
                str(row.user_id),
                row.prompt_tokens,
                row.completion_tokens,
            )
        )
    return found


def boot_settings(state: Mapping[str, Any]) -> list[dict[str, str]]:
    """What only a start can change: its name, what holds, and the setting to change."""
    kv, model = state.get("kv") or {}, state.get("model") or {}
    if not model or not kv.get("blocks_total"):
        return []
    per_token = kv["bytes_per_block"] / kv["block_size"]
    return [
        {
            "label": "Number format",
            "help": "Of the calculation and of the memory for answers. Half as wide holds twice as "
            "many tokens; some processors are slower with it.",
            "now": str(model.get("dtype", "")),
            "why": f"asked for: {settings.APPLIANCE_DTYPE}",
            "name": "APPLIANCE_DTYPE",
        },
        {
            "label": "Number format of keys and values",
            "help": "Of what each token keeps in the memory for answers. In 8 bits (int8) nearly "
            "twice as many tokens fit, and answers stray a little further from the model's. "
            f"One token takes {per_token / 1024:,.1f} KiB now: keys and values of this model's "
            "key-value heads only.",
            "now": str(model.get("kv_dtype", "")),
            "why": f"asked for: {settings.APPLIANCE_KV_DTYPE}",
            "name": "APPLIANCE_KV_DTYPE",
        },
        {
            "label": "Device",
            "help": "Where the model runs.",
            "now": str(model.get("device", "")),
            "why": f"asked for: {settings.APPLIANCE_DEVICE}",
            "name": "APPLIANCE_DEVICE",
        },
    ]
