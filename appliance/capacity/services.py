"""Follow and end capacity tests; one that died is told so. Blocking."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from appliance.accounts.acts import act_done
from appliance.accounts.models import User
from appliance.api_keys.models import ApiKey
from appliance.api_keys.services import api_key_issue, api_key_revoke
from appliance.capacity.figures import Level
from appliance.capacity.models import CapacityLevel, CapacityRun
from appliance.capacity.plan import Plan
from appliance.capacity.probe import SOURCE
from appliance.errors import EngineUnavailable, NotFound
from appliance.serving.start import address_read

KEY_NAME = "Capacity test"
# Longer than any test; the key is revoked at the test's end, this is for one that died.
KEY_LIFE = timedelta(hours=3)
# A worker that has not said for this long that it lives is dead.
DEAD_AFTER = timedelta(seconds=30)
# A worker takes a test at once. The page says after this long that none has.
SLOW_PICK_UP = timedelta(seconds=5)
NEVER_PICKED_UP = timedelta(minutes=2)

_Status = CapacityRun.Status


def run_of(run_id: int) -> CapacityRun:
    """Raises NotFound."""
    run = CapacityRun.objects.filter(pk=run_id).first()
    if run is None:
        raise NotFound("There is no such test.")
    return run


def run_stop(run_id: int, by: User) -> None:
    """End the test soon; what was measured is kept. Does nothing when it has ended."""
    reason = f"{by.username} stopped it."
    waiting = CapacityRun.objects.filter(pk=run_id, status=_Status.QUEUED)
    stopped = {"status": _Status.STOPPED, "is_open": False, "ended_at": timezone.now()}
    with transaction.atomic():
        was_open = waiting.update(**stopped, reason=reason) or CapacityRun.objects.filter(
            pk=run_id, is_open=True, stop_asked=False
        ).update(stop_asked=True, reason=reason)
        if was_open:
            act_done(by, "capacity.stop", f"{run_id}")


def run_claim(run_id: int) -> CapacityRun | None:
    """For the worker: the test if nobody took it yet. A task delivered twice gets None (D06)."""
    now = timezone.now()
    claimed = CapacityRun.objects.filter(pk=run_id, status=_Status.QUEUED).update(
        status=_Status.RUNNING, started_at=now, alive_at=now
    )
    return CapacityRun.objects.select_related("started_by").get(pk=run_id) if claimed else None


def run_progress(run_id: int, progress: Mapping[str, Any]) -> str | None:
    """Say that the worker lives; returns why the test must end, if it must."""
    row = CapacityRun.objects.filter(pk=run_id)
    row.filter(is_open=True).update(progress=dict(progress), alive_at=timezone.now())
    run = row.only("stop_asked", "is_open", "reason").first()
    if run is None or not run.is_open:
        return "It was given up, as its worker did not answer."
    return run.reason if run.stop_asked else None


def run_level_save(run_id: int, level: Level) -> None:
    CapacityLevel.objects.update_or_create(
        run_id=run_id, users=level.users, defaults={"figures": level.as_dict()}
    )


def run_slots_held(run_id: int, held: Mapping[str, Any] | None) -> None:
    CapacityRun.objects.filter(pk=run_id).update(slots=held)


def run_end(run_id: int, status: str, reason: str = "") -> None:
    """Once: the first end stays. The key goes in any case."""
    CapacityRun.objects.filter(pk=run_id, is_open=True).update(
        status=status, reason=reason, is_open=False, ended_at=timezone.now()
    )
    key_id = CapacityRun.objects.filter(pk=run_id).values_list("key_id", flat=True).first()
    key = ApiKey.objects.filter(pk=key_id).first()
    if key is not None:
        api_key_revoke(key)


def run_keep(
    plan: Plan, levels: Sequence[Level], facts: Mapping[str, Any], *, by: str
) -> CapacityRun:
    """Put a test that ran in a terminal, maybe of another server, among the page's tests."""
    now = timezone.now()
    with transaction.atomic():
        run = CapacityRun.objects.create(
            status=_Status.DONE,
            is_open=False,
            started_by_name=by,
            ended_at=now,
            plan=plan.as_dict(),
            facts=dict(facts),
        )
        for level in levels:
            run_level_save(run.pk, level)
    return run


def runs_heal() -> None:
    """Fail tests whose worker died, or that no worker took. Safe at any time (D06)."""
    now = timezone.now()
    dead = CapacityRun.objects.filter(status=_Status.RUNNING, alive_at__lt=now - DEAD_AFTER)
    for run_id in dead.values_list("pk", flat=True):
        run_end(run_id, _Status.FAILED, "The background worker ended in the middle of it.")
    left = CapacityRun.objects.filter(status=_Status.QUEUED, created_at__lt=now - NEVER_PICKED_UP)
    for run_id in left.values_list("pk", flat=True):
        run_end(run_id, _Status.FAILED, "No background worker took it up.")


def key_issue(owner: User, *, is_low_priority: bool) -> tuple[ApiKey, str]:
    """A key of the test's own. Raises NotAllowed when `owner` is no admin."""
    return api_key_issue(
        owner,
        KEY_NAME,
        ("chat", "models", "admin"),
        KEY_LIFE,
        source=SOURCE,
        generation_class="background" if is_low_priority else "api",
    )


def own_server() -> tuple[str, int]:
    """`…/v1` and process id of the server on this data folder. Raises EngineUnavailable."""
    found = address_read(settings.DATA_DIR)
    if found is None:
        raise EngineUnavailable(
            f"No server runs on the data folder {settings.DATA_DIR}. Start one with "
            "manage.py serve, or name another with --url."
        )
    url, pid = found
    return f"{url.rstrip('/')}/v1", pid
