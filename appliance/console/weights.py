"""Shares of service under load: weights of members and groups, given to the engine as they change.

A member's own weight goes before those of groups; of several groups the highest holds. Whoever has
none weighs 1; weight 2 gets twice as much as weight 1 while both wait.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

from django.contrib.auth.models import Group
from django.db import DatabaseError, transaction

from appliance.accounts.acts import act_done
from appliance.accounts.models import User
from appliance.console.models import ShareWeight
from appliance.errors import ApplianceError, NotFound
from appliance.serving.backend import Backend
from appliance.serving.booking import in_db_thread

logger = logging.getLogger(__name__)

LOWEST, HIGHEST = 0.01, 100.0
# Weights and members of groups change in threads and processes that cannot reach the engine.
LOOK_EVERY_S = 5.0


def subject_of(who: str) -> User | Group:
    """`who` is `user:ID` or `group:ID`. Raises NotFound."""
    kind, _, number = who.partition(":")
    model: Any = {"user": User, "group": Group}.get(kind)
    is_number = number.isascii() and number.isdigit() and len(number) < 19
    found = model.objects.filter(pk=int(number)).first() if model and is_number else None
    if found is None:
        raise NotFound("This member or group is gone.")
    return found  # type: ignore[no-any-return]


def weight_set(subject: User | Group, weight: float, by: User) -> ShareWeight:
    key = {"user": subject} if isinstance(subject, User) else {"group": subject}
    with transaction.atomic():
        before = ShareWeight.objects.filter(**key).values_list("weight", flat=True).first()
        row, _ = ShareWeight.objects.update_or_create(**key, defaults={"weight": weight})
        _told(by, row, before, weight)
    return row


def weight_clear(row_id: int, by: User) -> ShareWeight:
    """Raises NotFound."""
    with transaction.atomic():
        row = ShareWeight.objects.filter(pk=row_id).first()
        if row is None:
            raise NotFound("This weight is gone already.")
        _told(by, row, row.weight, None)
        row.delete()
    return row


def _told(by: User, row: ShareWeight, before: float | None, after: float | None) -> None:
    change = {"before": {"weight": before}, "after": {"weight": after}}
    act_done(by, "weight.set", row.who, **change)


def owner_weights() -> dict[str, float]:
    """The engine's owner -> weight. Blocking."""
    rows = list(ShareWeight.objects.all())
    of_group = {row.group_id: row.weight for row in rows if row.group_id is not None}
    found: dict[str, float] = {}
    members = User.groups.through.objects.filter(group_id__in=of_group)
    for user_id, group_id in members.values_list("user_id", "group_id"):
        owner = f"user:{user_id}"
        found[owner] = max(found.get(owner, 0.0), of_group[group_id])
    found.update({f"user:{row.user_id}": row.weight for row in rows if row.user_id is not None})
    return found


class WeightKeeper:
    """Gives the engine the weights that hold; on the event loop of the process that serves."""

    def __init__(self) -> None:
        self._given: Mapping[str, float] = {}
        self._backend: Backend | None = None
        self._look_at_s = 0.0

    async def keep(self, backend: Backend) -> None:
        now_s = time.monotonic()
        if backend is not self._backend:
            self._backend, self._given = backend, {}
        elif now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_EVERY_S
        try:
            weights = await in_db_thread(owner_weights)
            if weights != self._given:
                backend.tune({"owner_weights": weights})
                self._given = weights
        except (DatabaseError, ApplianceError):
            logger.warning("the weights of members are not given to the engine", exc_info=True)
