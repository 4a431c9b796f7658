"""The record of admins' acts: how a row is written and how it reads."""

from collections.abc import Mapping
from typing import Any

from appliance.accounts.acts import Act
from appliance.console.event_words import SETTING_WORDS, value_words
from appliance.console.models import AuditRecord
from appliance.quotas.limits import LIMIT_KINDS

# Who did it where no person did.
BY_ITSELF = "the server"

EXPOSURE_WORDS = {
    "bind_host": "Address",
    "port": "Port",
    "allowed_hosts": "Names",
    "allowed_networks": "Networks",
    "trusted_proxies": "Proxies",
}
_NONE_WORDS = {
    "allowed_hosts": "only this machine's own",
    "allowed_networks": "none named",
    "trusted_proxies": "none",
    "max_life_days": "no limit",
    "members": "nobody",
    "allowed_models": "all",
}
_FIELD_WORDS = {
    **SETTING_WORDS,
    **EXPOSURE_WORDS,
    **{kind.name: kind.label for kind in LIMIT_KINDS.values()},
    "wait_s": "Wait in seconds",
    "members": "Members",
    "weight": "Share under load",
    "allowed_models": "Models",
    "max_live_keys": "Keys a member at most",
    "max_life_days": "Longest life in days",
}
_ORDER = {name: number for number, name in enumerate(_FIELD_WORDS)}
# Action -> kind for the filter of the history page, and the words before the target or the change.
ACTIONS = {
    "request.kill": ("engine", "Killed request"),
    "engine.tune": ("engine", "Tuned"),
    "weight.set": ("engine", "Weight of"),
    "capacity.start": ("engine", "Started capacity test"),
    "capacity.stop": ("engine", "Stopped capacity test"),
    "exposure.change": ("exposure", "Changed exposure"),
    "exposure.try": ("exposure", "Put exposure on trial"),
    "exposure.keep": ("exposure", "Kept the trial"),
    "exposure.take_back": ("exposure", "Took the trial back"),
    "user.create": ("users", "Added"),
    "service.create": ("users", "Added the service account"),
    "user.make_admin": ("users", "Made admin:"),
    "user.take_admin": ("users", "Took admin away from"),
    "user.activate": ("users", "Switched on"),
    "user.deactivate": ("users", "Switched off"),
    "user.link": ("users", "Made a sign-in link for"),
    "quota.set": ("quotas", "Quota of"),
    "quota.clear": ("quotas", "Quota of"),
    "limit.add": ("quotas", "Made a rule for"),
    "limit.change": ("quotas", "Changed the rule for"),
    "limit.delete": ("quotas", "Deleted the rule for"),
    "group.create": ("users", "Made the group"),
    "group.members": ("users", "Changed the group"),
    "group.delete": ("users", "Deleted the group"),
    "key.revoke": ("keys", "Revoked key"),
    "key.create": ("keys", "Made key"),
    "key.restrict": ("keys", "Changed key"),
    "key.rotate": ("keys", "Rotated key"),
    "key.rules": ("keys", "Changed the rules for keys"),
    "chat.instructions": ("chat", "Changed the team's instructions to"),
    "model.load": ("models", "Began to load the model"),
    "model.pull": ("models", "Began to fetch the model"),
    "model.import": ("models", "Began to import the model"),
    "model.stop": ("models", "Stopped fetching or importing"),
    "model.delete": ("models", "Deleted the model"),
}
KINDS = ("engine", "models", "chat", "exposure", "users", "keys", "quotas")


def act_record(act: Act) -> None:
    """Write one act down. Blocking."""
    row = AuditRecord(
        actor=act.by,
        actor_name=act.by.username if act.by else BY_ITSELF,
        action=act.action,
        target=act.target[:200],
        detail=dict(act.detail),
    )
    if act.at is not None:
        row.at = act.at
    row.save()


def audit_words(record: AuditRecord) -> str:
    """One act as a sentence without its subject."""
    _, words = ACTIONS.get(record.action, ("", record.action.replace(".", " ")))
    if "after" in record.detail:
        changes = change_words(record.detail["before"], record.detail["after"])
        named = record.action.startswith(("quota.", "limit.", "group.", "weight.", "key.restrict"))
        whose = f" {record.target}" if named else ""
        why = record.detail.get("why")
        return f"{words}{whose}: {changes}" + (f" ({why})" if why else "")
    owner = record.detail.get("owner")
    return f"{words} {record.target}" + (f" of {owner}" if owner else "")


def change_words(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{_FIELD_WORDS.get(name, name)} {_shown(name, before.get(name))} → {_shown(name, value)}"
        # PostgreSQL keeps no order of names.
        for name, value in sorted(after.items(), key=lambda item: _ORDER.get(item[0], 0))
    )


def _shown(name: str, value: Any) -> str:
    if value is None or value == []:
        return _NONE_WORDS.get(name, "no limit" if name in LIMIT_KINDS else "none")
    if isinstance(value, list):
        return ", ".join(str(entry) for entry in value)
    return str(value) if name == "port" else value_words(value)
