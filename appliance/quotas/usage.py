"""Reading what was used: old days from the roll-ups, young ones from the ledger itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from django.db.models import Count, QuerySet, Sum
from django.db.models.functions import TruncHour
from django.utils import timezone

from appliance.accounts.models import User
from appliance.quotas.limits import quota_day
from appliance.quotas.models import UsageRecord, UsageRollup
from appliance.quotas.rollup import rolled_days_before, rolled_hours_before

_DIMENSIONS = ("username", "source", "key_prefix", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class UsagePart:
    """What one member took on one day, or in one hour, through one door, key and model."""

    day: date
    # Its begin; None for a whole day.
    hour: datetime | None = None
    username: str
    source: str
    key_prefix: str = ""
    model: str = ""
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


def usage_parts(user: User | None = None, *, days: int = 30) -> list[UsagePart]:
    """The last `days` days of the user, or of everybody; newest day first."""
    first = quota_day() - timedelta(days=days - 1)
    border = rolled_days_before() or first
    rows = _records(user, day__gte=max(first, border))
    rollups = _rollups(user, span=UsageRollup.Span.DAY, day__gte=first, day__lt=border)
    return _sorted([*_parts(rows, "day"), *_parts(rollups, "day")])


def usage_hours(user: User | None = None, *, hours: int = 24) -> list[UsagePart]:
    """The hours up to now, `hours` of them, newest first. An answer counts when it was booked."""
    now = timezone.now().replace(minute=0, second=0, microsecond=0)
    first = now - timedelta(hours=hours - 1)
    border = rolled_hours_before() or first
    rows = _records(user, created_at__gte=max(first, border)).annotate(
        hour=TruncHour("created_at", tzinfo=UTC)
    )
    rollups = _rollups(user, span=UsageRollup.Span.HOUR, hour__gte=first, hour__lt=border)
    return _sorted([*_parts(rows, "hour"), *_parts(rollups, "hour")])


def _records(user: User | None, **about: Any) -> QuerySet[Any]:
    rows = UsageRecord.objects.filter(**about)
    return rows if user is None else rows.filter(user=user)


def _rollups(user: User | None, **about: Any) -> QuerySet[Any]:
    rows = UsageRollup.objects.filter(**about)
    return rows if user is None else rows.filter(user=user)


def _parts(rows: QuerySet[Any], when: str) -> list[UsagePart]:
    is_ledger = rows.model is UsageRecord
    sums = (
        rows.order_by()
        .values(when, *_DIMENSIONS)
        .annotate(
            num=Count("pk") if is_ledger else Sum("num_requests"),
            prompt=Sum("prompt_tokens"),
            cached=Sum("cached_tokens"),
            completion=Sum("completion_tokens"),
        )
    )
    return [
        UsagePart(
            day=quota_day(row["hour"]) if when == "hour" else row["day"],
            hour=row.get("hour"),
            **{name: row[name] for name in _DIMENSIONS},
            num_requests=row["num"],
            prompt_tokens=row["prompt"],
            cached_tokens=row["cached"],
            completion_tokens=row["completion"],
        )
        for row in sums
    ]


def _sorted(parts: list[UsagePart]) -> list[UsagePart]:
    parts.sort(key=lambda part: (part.username, part.source, part.key_prefix, part.model))
    return sorted(parts, key=lambda part: part.hour or part.day, reverse=True)


def tokens_of_keys(key_ids: Sequence[int], *, days: int = 7) -> dict[int, int]:
    """Key id -> tokens of the last `days` days."""
    rows = (
        UsageRecord.objects.filter(key_id__in=key_ids, day__gt=quota_day() - timedelta(days=days))
        .values("key_id")
        .annotate(tokens=Sum("prompt_tokens") + Sum("completion_tokens"))
    )
    return {row["key_id"]: row["tokens"] for row in rows}
