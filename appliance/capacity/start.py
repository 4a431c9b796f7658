"""Start a capacity test: write it down and hand it to the worker. One at a time. Blocking."""

import logging

from django.db import IntegrityError, transaction
from kombu.exceptions import OperationalError as BrokerError

from appliance.accounts.acts import act_done
from appliance.accounts.models import User
from appliance.capacity.models import CapacityRun
from appliance.capacity.plan import Plan
from appliance.capacity.selectors import mix_named
from appliance.capacity.services import run_end, runs_heal
from appliance.capacity.tasks import run_capacity
from appliance.errors import Conflict, EngineUnavailable

logger = logging.getLogger(__name__)


def run_start(plan: Plan, by: User) -> CapacityRun:
    """Write the test down and hand it to the worker.

    Raises BadRequest for a mix that there is not, Conflict when a test runs, EngineUnavailable
    when the worker's queue does not take it.
    """
    mix = mix_named(plan.mix)
    runs_heal()
    facts = {"median_prompt": mix.median_prompt, "median_answer": mix.median_answer}
    try:
        with transaction.atomic():
            run = CapacityRun.objects.create(
                started_by=by, started_by_name=by.username, plan=plan.as_dict(), facts=facts
            )
            levels = ", ".join(str(users) for users in plan.levels)
            act_done(by, "capacity.start", f"{run.pk} with {levels} at the same time")
    except IntegrityError as exc:
        raise Conflict("A test is running. Wait for its end, or stop it first.") from exc
    try:
        run_capacity.delay(run.pk)
    except (BrokerError, OSError) as exc:
        logger.warning("the task queue does not take the capacity test: %s", exc)
        run_end(run.pk, CapacityRun.Status.FAILED, "The task queue does not answer.")
        raise EngineUnavailable(
            "The test cannot start: the task queue does not answer. Check Redis, or the data "
            "folder's free space, and try again."
        ) from exc
    return run
