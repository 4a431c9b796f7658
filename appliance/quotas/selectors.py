"""Reading the ledger: for the account page and the console."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta

from django.db.models import Count, QuerySet, Sum

from appliance.accounts.models import User
from appliance.quotas.models import QuotaRule, UsageDay, UsageRecord
from appliance.quotas.services import (
    QuotaStatus,
    quota_day,
    quota_default_limit,
    quota_resets_at,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DayUsage:
    day: date
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


def usage_by_day(user: User | None = None, *, days: int = 14) -> list[DayUsage]:
    """The last `days` days with any use, newest first; of everybody without a user."""
    records = UsageRecord.objects.filter(day__gt=quota_day() - timedelta(days=days))
    if user is not None:
        records = records.filter(user=user)
    rows = records.values("day").annotate(
        num_requests=Count("pk"),
        prompt=Sum("prompt_tokens"),
        cached=Sum("cached_tokens"),
        completion=Sum("completion_tokens"),
    )
    return [
        DayUsage(
            day=row["day"],
            num_requests=row["num_requests"],
            prompt_tokens=row["prompt"],
            cached_tokens=row["cached"],
            completion_tokens=row["completion"],
        )
        for row in rows.order_by("-day")
    ]


def usage_recent(user: User | None = None) -> QuerySet[UsageRecord]:
    """Ledger rows, newest first."""
    records = UsageRecord.objects.order_by("-created_at", "-pk")
    return records if user is None else records.filter(user=user)


def usage_tokens_by_key(user: User, *, days: int = 30) -> dict[int, int]:
    """Key id -> tokens of the last `days` days."""
    rows = (
        UsageRecord.objects.filter(user=user, day__gt=quota_day() - timedelta(days=days))
        .exclude(key_id=None)
        .values("key_id")
        .annotate(tokens=Sum("prompt_tokens") + Sum("completion_tokens"))
    )
    return {row["key_id"]: row["tokens"] for row in rows}


def quota_rules(users: Sequence[User]) -> dict[int, int | None]:
    """User id -> tokens a day, for those with a rule of their own; None tokens is no limit."""
    return dict(QuotaRule.objects.filter(user__in=users).values_list("user_id", "tokens_per_day"))


def quota_statuses(users: Sequence[User]) -> dict[int, QuotaStatus]:
    """User id -> today's status, in three queries for any number of users."""
    day = quota_day()
    default = quota_default_limit()
    rules = quota_rules(users)
    rows = {row.user_id: row for row in UsageDay.objects.filter(user__in=users, day=day)}
    found = {}
    for user in users:
        limit = rules.get(user.pk, default)
        row = rows.get(user.pk)
        used, reserved = (row.used_tokens, row.reserved_tokens) if row else (0, 0)
        found[user.pk] = QuotaStatus(
            limit_tokens=limit,
            used_tokens=used,
            reserved_tokens=reserved,
            left_tokens=None if limit is None else max(0, limit - used - reserved),
            resets_at=quota_resets_at(day),
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class UsagePart:
    """What one member took on one day through one door."""

    day: date
    username: str
    source: str
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


def usage_parts(user: User | None = None, *, days: int = 30) -> list[UsagePart]:
    """The ledger of the last `days` days by day, member and door, newest day first."""
    records = UsageRecord.objects.filter(day__gt=quota_day() - timedelta(days=days))
    if user is not None:
        records = records.filter(user=user)
    rows = records.values("day", "username", "source").annotate(
        num_requests=Count("pk"),
        prompt=Sum("prompt_tokens"),
        cached=Sum("cached_tokens"),
        completion=Sum("completion_tokens"),
    )
    return [
        UsagePart(
            day=row["day"],
            username=row["username"],
            source=row["source"],
            num_requests=row["num_requests"],
            prompt_tokens=row["prompt"],
            cached_tokens=row["cached"],
            completion_tokens=row["completion"],
        )
        for row in rows.order_by("-day", "username", "source")
    ]


def tokens_of_keys(key_ids: Sequence[int], *, days: int = 7) -> dict[int, int]:
    """Key id -> tokens of the last `days` days."""
    rows = (
        UsageRecord.objects.filter(key_id__in=key_ids, day__gt=quota_day() - timedelta(days=days))
        .values("key_id")
        .annotate(tokens=Sum("prompt_tokens") + Sum("completion_tokens"))
    )
    return {row["key_id"]: row["tokens"] for row in rows}
