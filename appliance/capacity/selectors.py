"""What the capacity test reads: the team's lengths, waits of its own requests, runs. Blocking."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from django.utils import timezone

from appliance.capacity.figures import Level
from appliance.capacity.mix import PRESETS, TEAM, Mix
from appliance.capacity.models import CapacityRun
from appliance.capacity.plan import Plan
from appliance.capacity.probe import SOURCE
from appliance.capacity.recommend import Advice, advise
from appliance.errors import BadRequest
from appliance.quotas.models import UsageRecord

TEAM_DAYS = 7
# Fewer answers say little about a team.
LEAST_TEAM_ANSWERS = 20
MAX_TEAM_ANSWERS = 2000
SHOWN_RUNS = 20


def team_mix(now: datetime | None = None) -> Mix | None:
    """Lengths of the last week's answers, without those of tests; None when there are too few."""
    since = (now or timezone.now()) - timedelta(days=TEAM_DAYS)
    rows = (
        UsageRecord.objects.filter(created_at__gte=since, prompt_tokens__gt=0)
        .filter(completion_tokens__gt=0)
        .exclude(source=SOURCE)
        .order_by("-created_at")
        .values_list("prompt_tokens", "completion_tokens")
    )
    lengths = list(rows[:MAX_TEAM_ANSWERS])
    return Mix(TEAM, lengths) if len(lengths) >= LEAST_TEAM_ANSWERS else None


def mix_named(name: str) -> Mix:
    """Raises BadRequest for an unknown name, and for the team's when there is no such week."""
    if name in PRESETS:
        return PRESETS[name]
    if name != TEAM:
        raise BadRequest(
            f"{name[:40]!r} is no kind of request; there are {', '.join((*PRESETS, TEAM))}.",
            param="mix",
        )
    mix = team_mix()
    if mix is None:
        raise BadRequest(
            f"The last {TEAM_DAYS} days have fewer than {LEAST_TEAM_ANSWERS} answers, too few to "
            "go by. Choose another kind of request.",
            param="mix",
        )
    return mix


def queue_times(key_id: int, since: float) -> list[float]:
    """Seconds in the queue of the key's answers that ended after `since` (unix time)."""
    begin = datetime.fromtimestamp(since, UTC)
    rows = UsageRecord.objects.filter(key_id=key_id, created_at__gte=begin)
    return list(rows.values_list("queue_s", flat=True))


def levels_of(run: CapacityRun) -> list[Level]:
    return [Level.from_dict(row.figures) for row in run.level_rows.all()]


def advice_of(run: CapacityRun, levels: Sequence[Level], slots_now: int | None = None) -> Advice:
    return advise(levels, Plan.from_dict(run.plan).limits, slots_now=slots_now)


def run_as_dict(run: CapacityRun) -> dict[str, Any]:
    """For export: what was asked, what was measured, what follows."""
    levels = levels_of(run)
    advice = advice_of(run, levels)
    return {
        "id": run.pk,
        "status": run.status,
        "started_by": run.started_by_name,
        "started_at": run.started_at and run.started_at.isoformat(),
        "ended_at": run.ended_at and run.ended_at.isoformat(),
        "reason": run.reason,
        "plan": run.plan,
        "facts": run.facts,
        "levels": [level.as_dict() for level in levels],
        "recommended_users": advice.users,
        "knee": advice.knee,
        "advice": f"{advice.title}. {advice.text}",
    }


def runs_shown() -> list[CapacityRun]:
    """The newest tests, with their levels."""
    return list(CapacityRun.objects.prefetch_related("level_rows")[:SHOWN_RUNS])
