"""Adds the ledger up by hour and by day, so that old ranges are read from few rows.

Whole hours and days are rebuilt from the ledger, never added to: running twice, at the same time,
or after days of standstill gives the same sums. Blocking.
"""

import logging
from datetime import UTC, date, datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Count, Min, QuerySet, Sum
from django.db.models.functions import TruncHour
from django.utils import timezone

from appliance.quotas.limits import quota_day
from appliance.quotas.models import RollupState, UsageRecord, UsageRollup

logger = logging.getLogger(__name__)

# Pages read this much and less from the ledger itself.
LEAST_LEDGER_DAYS = 60
_ONLY_ROW = 1
# A booking has its time before it is committed: what is this old is looked at once more.
_OVERLAP = timedelta(hours=1)
_DIMENSIONS = ("user_id", "username", "key_id", "key_prefix", "source", "model")


def usage_roll_up() -> int:
    """Rebuild every hour and day that got rows since the last run; returns how many."""
    RollupState.objects.bulk_create([RollupState(pk=_ONLY_ROW)], ignore_conflicts=True)
    now = timezone.now()
    since = _done_until()
    fresh = UsageRecord.objects.all()
    if since is not None:
        fresh = fresh.filter(created_at__gte=since - _OVERLAP)
    days = list(fresh.order_by("day").values_list("day", flat=True).distinct())
    hours = fresh.annotate(hour=TruncHour("created_at", tzinfo=UTC))
    hours = list(hours.order_by("hour").values_list("hour", flat=True).distinct())
    for day in days:
        _rebuild(UsageRollup.Span.DAY, UsageRecord.objects.filter(day=day), day, None)
    for hour in hours:
        rows = UsageRecord.objects.filter(
            created_at__gte=hour, created_at__lt=hour + timedelta(hours=1)
        )
        _rebuild(UsageRollup.Span.HOUR, rows, None, hour)
    RollupState.objects.filter(pk=_ONLY_ROW).update(done_until=now)
    _trim(now)
    return len(days) + len(hours)


def _trim(now: datetime) -> None:
    """Delete ledger rows past the days that are kept; the roll-ups keep their sums."""
    if not settings.APPLIANCE_LEDGER_DAYS:
        return
    age = timedelta(days=max(settings.APPLIANCE_LEDGER_DAYS, LEAST_LEDGER_DAYS))
    # Both: no row goes that this or a later run would still add up.
    old = UsageRecord.objects.filter(day__lt=quota_day(now - age), created_at__lt=now - age)
    num_deleted, _ = old.delete()
    if num_deleted:
        logger.info("deleted %s rows of the ledger from before %s", num_deleted, now - age)


def _done_until() -> datetime | None:
    state = RollupState.objects.filter(pk=_ONLY_ROW).first()
    return None if state is None else state.done_until


def _rebuild(
    span: UsageRollup.Span, rows: QuerySet[UsageRecord], day: date | None, hour: datetime | None
) -> None:
    with transaction.atomic():
        # One run at a time: two would both delete what is there and then both add.
        RollupState.objects.select_for_update().get(pk=_ONLY_ROW)
        old = UsageRollup.objects.filter(span=span)
        (old.filter(hour=hour) if day is None else old.filter(day=day)).delete()
        UsageRollup.objects.bulk_create(
            UsageRollup(span=span, hour=hour, **_fields(row, day)) for row in _sums(rows)
        )


def _sums(rows: QuerySet[UsageRecord]) -> QuerySet[Any]:
    return rows.values(*_DIMENSIONS).annotate(
        requests=Count("pk"),
        prompt=Sum("prompt_tokens"),
        cached=Sum("cached_tokens"),
        completion=Sum("completion_tokens"),
        first_day=Min("day"),
    )


def _fields(row: dict[str, Any], day: date | None) -> dict[str, Any]:
    return {
        **{name: row[name] for name in _DIMENSIONS},
        "day": day or row["first_day"],
        "num_requests": row["requests"],
        "prompt_tokens": row["prompt"],
        "cached_tokens": row["cached"],
        "completion_tokens": row["completion"],
    }


def rolled_days_before() -> date | None:
    """Days before this one are added up and get no more rows but by accident; None: none yet.

    A day is left to the ledger for a day more: an answer over midnight is charged to the day on
    which it began.
    """
    done = _done_until()
    return None if done is None else quota_day(done - timedelta(days=1))


def rolled_hours_before() -> datetime | None:
    """Hours that begin before this one are added up whole."""
    done = _done_until()
    if done is None:
        return None
    return (done - _OVERLAP).replace(minute=0, second=0, microsecond=0)
