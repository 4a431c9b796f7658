"""What is left of the limits: for the account page, the console and the API's headers."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db.models import Q
from django.utils import timezone

from appliance.accounts.models import User
from appliance.quotas.limits import minute_of, quota_day, quota_resets_at, window_resets_at
from appliance.quotas.models import LimitRule, Meter
from appliance.quotas.rules import Limit, limit_from, limits_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """One limit on a minute, day or month, and what it still allows."""

    limit: Limit
    used: int
    # Held by answers that run now.
    reserved: int
    resets_at: datetime

    @property
    def left(self) -> int:
        return max(0, self.limit.value - self.used - self.reserved)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaStatus:
    """Tokens of the day; of the month where its rule leaves less."""

    # "day" or "month"
    window: str

    # None is no limit.
    limit_tokens: int | None
    used_tokens: int
    reserved_tokens: int
    # None without a limit; else what a new request may still reserve.
    left_tokens: int | None
    resets_at: datetime


def allowances(user_id: int, key_id: int | None = None) -> list[Allowance]:
    """What each rule still allows; of rules with one kind of limit on one meter the tightest."""
    limits = limits_of(user_id, key_id)
    meters = Meter.objects.filter(Q(user_id=user_id) | Q(key_id=key_id, key__isnull=False))
    found = {meter.key_id is not None: meter for meter in meters}
    return _allowances(limits, found.get(False), found.get(True))


def _allowances(
    limits: Sequence[Limit], of_user: Meter | None, of_key: Meter | None = None
) -> list[Allowance]:
    now = timezone.now()
    minute, day = minute_of(now), quota_day(now)
    found: dict[tuple[str, bool], Allowance] = {}
    for limit in limits:
        # They come with the least value first.
        if not limit.kind.window or (limit.name, limit.of_key) in found:
            continue
        meter = (of_key if limit.of_key else of_user) or Meter()
        meter.roll(minute, day)
        window = limit.kind.window
        is_count = limit.name == "requests_per_minute"
        found[limit.name, limit.of_key] = Allowance(
            limit=limit,
            used=meter.minute_requests if is_count else getattr(meter, f"{window}_used"),
            reserved=0 if is_count else getattr(meter, f"{window}_reserved"),
            resets_at=window_resets_at(window, minute, day),
        )
    return list(found.values())


def caps_of(user_id: int) -> list[Limit]:
    """The tightest limit of each kind that no window counts: at a time, and in one request."""
    found: dict[str, Limit] = {}
    for limit in limits_of(user_id):
        if not limit.kind.window:
            found.setdefault(limit.name, limit)
    return list(found.values())


def quota_status(user: User | int) -> QuotaStatus:
    user_id = user if isinstance(user, int) else user.pk
    meter = Meter.objects.filter(user_id=user_id).first() or Meter()
    return _status(limits_of(user_id), meter)


def _status(limits: Sequence[Limit], meter: Meter) -> QuotaStatus:
    now = timezone.now()
    meter.roll(minute_of(now), quota_day(now))
    long = [each for each in _allowances(limits, meter) if each.limit.kind.window != "minute"]
    tightest = min(long, key=lambda each: each.left, default=None)
    return QuotaStatus(
        window=tightest.limit.kind.window if tightest else "day",
        limit_tokens=tightest.limit.value if tightest else None,
        used_tokens=tightest.used if tightest else meter.day_used,
        reserved_tokens=tightest.reserved if tightest else meter.day_reserved,
        left_tokens=tightest.left if tightest else None,
        resets_at=tightest.resets_at if tightest else quota_resets_at(quota_day(now)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberQuota:
    user: User
    used_today: int
    held_today: int
    limits: list[Limit]
    allowances: list[Allowance]

    @property
    def spent(self) -> list[Allowance]:
        """Limits that allow nothing more now."""
        return [each for each in self.allowances if not each.left]


def limit_rules() -> list[LimitRule]:
    """All rules; of one kind of limit the least value first."""
    rules = LimitRule.objects.select_related("group", "user", "key", "changed_by")
    return list(rules.order_by("limit", "value", "pk"))


def member_quotas(users: Sequence[User]) -> list[MemberQuota]:
    """In four queries for any number of users."""
    groups: dict[int, set[int]] = defaultdict(set)
    for user_id, group_id in User.groups.through.objects.filter(user__in=users).values_list(
        "user_id", "group_id"
    ):
        groups[user_id].add(group_id)
    meters = {meter.user_id: meter for meter in Meter.objects.filter(user__in=users)}
    rules = [rule for rule in limit_rules() if rule.key_id is None]
    found = []
    now = timezone.now()
    for user in users:
        limits = [
            limit_from(rule)
            for rule in rules
            if rule.user_id in (None, user.pk)
            and (rule.group_id is None or rule.group_id in groups[user.pk])
        ]
        meter = meters.get(user.pk) or Meter()
        meter.roll(minute_of(now), quota_day(now))
        found.append(
            MemberQuota(
                user=user,
                used_today=meter.day_used,
                held_today=meter.day_reserved,
                limits=limits,
                allowances=_allowances(limits, meter),
            )
        )
    return found
