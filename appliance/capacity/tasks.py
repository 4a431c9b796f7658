import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from celery import shared_task
from celery.signals import worker_shutting_down

from appliance.api_keys.services import api_key_revoke
from appliance.capacity.figures import Level
from appliance.capacity.load import LoadFailed, Target, first_model
from appliance.capacity.models import CapacityRun
from appliance.capacity.plan import Plan
from appliance.capacity.runner import CapacityTest, RunStopped, give_slots_back
from appliance.capacity.selectors import mix_named, queue_times
from appliance.capacity.services import (
    key_issue,
    own_server,
    run_claim,
    run_end,
    run_level_save,
    run_progress,
    run_slots_held,
    runs_heal,
)
from appliance.errors import ApplianceError
from appliance.serving.booking import in_db_thread

logger = logging.getLogger(__name__)

# The ledger is written just after an answer ends.
_LEDGER_WAIT_S = 2.0
_is_stopping = threading.Event()


@worker_shutting_down.connect
def _stop_soon(**_: Any) -> None:
    _is_stopping.set()


class LedgerWatcher:
    """Keeps the test's key's waits; what else a watcher does is up to its kind."""

    def __init__(self, key_id: int) -> None:
        self.key_id = key_id

    async def queue_times(self, since: float, number: int) -> Sequence[float]:
        deadline = time.monotonic() + _LEDGER_WAIT_S
        while True:
            found = await in_db_thread(queue_times, self.key_id, since)
            if len(found) >= number or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.1)


class _RunWatcher(LedgerWatcher):
    """Writes everything to the run's row, where the page looks."""

    def __init__(self, run_id: int, key_id: int) -> None:
        super().__init__(key_id)
        self._run_id = run_id

    async def progress(self, told: dict[str, Any]) -> None:
        if _is_stopping.is_set():
            raise RunStopped("The server was stopped.")
        reason = await in_db_thread(run_progress, self._run_id, told)
        if reason is not None:
            raise RunStopped(reason)

    async def level_done(self, level: Level) -> None:
        await in_db_thread(run_level_save, self._run_id, level)

    async def slots_held(self, held: dict[str, Any] | None) -> None:
        await in_db_thread(run_slots_held, self._run_id, held)


@shared_task
def run_capacity(run_id: int) -> None:
    """Run the test with this id, unless it was taken or stopped already."""
    run = run_claim(run_id)
    if run is None:
        return
    status, reason = (
        CapacityRun.Status.FAILED,
        "The test failed by a fault of its own; see the log.",
    )
    try:
        asyncio.run(_run(run))
        status, reason = CapacityRun.Status.DONE, ""
    except RunStopped as exc:
        status, reason = CapacityRun.Status.STOPPED, str(exc)
    except ApplianceError as exc:
        reason = exc.message
    finally:
        run_end(run.pk, status, reason)


async def _run(run: CapacityRun) -> None:
    plan, url, pid, mix = await in_db_thread(_prepared, run)
    key, secret = await in_db_thread(_key, run, plan)
    target = Target(url, secret)
    target = replace(target, model=await first_model(target))
    await in_db_thread(_note, run, target)
    watcher = _RunWatcher(run.pk, key.pk)
    await CapacityTest(target, mix, plan, watcher, is_own=True, server_pid=pid).run()


def _prepared(run: CapacityRun) -> tuple[Plan, str, int, Any]:
    plan = Plan.from_dict(run.plan)
    url, pid = own_server()
    return plan, url, pid, mix_named(plan.mix)


def _key(run: CapacityRun, plan: Plan) -> Any:
    if run.started_by is None:
        raise LoadFailed("The account of the admin who asked for the test is gone.")
    key, secret = key_issue(run.started_by, is_low_priority=plan.is_low_priority)
    CapacityRun.objects.filter(pk=run.pk).update(key_id=key.pk)
    return key, secret


def _note(run: CapacityRun, target: Target) -> None:
    facts = {**run.facts, "model": target.model}
    CapacityRun.objects.filter(pk=run.pk).update(facts=facts)


@shared_task
def heal_capacity() -> None:
    """Fail tests that died, and give back the slots that one still holds."""
    runs_heal()
    for run in CapacityRun.objects.filter(is_open=False, slots__isnull=False):
        if run.started_by is None:
            run_slots_held(run.pk, None)
            continue
        try:
            url, _ = own_server()
            key, secret = key_issue(run.started_by, is_low_priority=True)
        except ApplianceError as exc:
            logger.info("the slots of capacity test %s wait: %s", run.pk, exc.message)
            continue
        try:
            asyncio.run(give_slots_back(Target(url, secret), run.slots))
            run_slots_held(run.pk, None)
        except LoadFailed as exc:
            logger.warning("the slots of capacity test %s wait: %s", run.pk, exc.message)
        finally:
            api_key_revoke(key)
