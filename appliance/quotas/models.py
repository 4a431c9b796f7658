"""Who may use how much, what is held for running answers, and the one ledger."""

import uuid
from datetime import date, datetime

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils import timezone


class LimitRule(models.Model):
    """One limit for everybody, for each member of a group, for one user or for one key.

    All rules that fit a request hold; the tightest decides. A rule for everybody or for a group
    counts each member by themselves.
    """

    class Limit(models.TextChoices):
        REQUESTS_PER_MINUTE = "requests_per_minute"
        TOKENS_PER_MINUTE = "tokens_per_minute"
        TOKENS_PER_DAY = "tokens_per_day"
        TOKENS_PER_MONTH = "tokens_per_month"
        CONCURRENT_REQUESTS = "concurrent_requests"
        CONTEXT_TOKENS = "context_tokens"
        # Percent of the slots that are in effect.
        SLOT_SHARE = "slot_share"

    limit = models.CharField(max_length=30, choices=Limit.choices)
    value = models.PositiveBigIntegerField()
    # At most one of the three; none of them is a rule for everybody.
    group = models.ForeignKey(
        "auth.Group", null=True, blank=True, on_delete=models.CASCADE, related_name="limit_rules"
    )
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        null=True,
        blank=True,
        on_delete=models.CASCADE,
        related_name="limit_rules",
    )
    key = models.ForeignKey(
        "api_keys.ApiKey",
        null=True,
        blank=True,
        on_delete=models.CASCADE,
        related_name="limit_rules",
    )
    # Past the limit a request waits this long for its turn before it is refused; 0 refuses at once.
    wait_s = models.PositiveIntegerField(default=0)
    changed_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    changed_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(group=None, user=None)
                | Q(group=None, key=None)
                | Q(user=None, key=None),
                name="limit_rule_has_one_subject",
            ),
            models.UniqueConstraint(
                fields=["limit"],
                condition=Q(group=None, user=None, key=None),
                name="limit_rule_once_for_everybody",
            ),
            models.UniqueConstraint(
                fields=["limit", "group"],
                condition=Q(group__isnull=False),
                name="limit_rule_once_a_group",
            ),
            models.UniqueConstraint(
                fields=["limit", "user"],
                condition=Q(user__isnull=False),
                name="limit_rule_once_a_user",
            ),
            models.UniqueConstraint(
                fields=["limit", "key"],
                condition=Q(key__isnull=False),
                name="limit_rule_once_a_key",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.limit} {self.value} for {self.who}"

    @property
    def who(self) -> str:
        """Whom it is for, in words."""
        if self.key is not None:
            return f"the key “{self.key.name}” ({self.key.prefix})"
        if self.group is not None:
            return f"the group “{self.group.name}”"
        return self.user.username if self.user is not None else "everybody"


class Meter(models.Model):
    """What one user, or one key, took in the minute, day and month that run (team's time zone).

    Changed by `services` only: under a lock, and by an UPDATE that names the version it read.
    """

    user = models.OneToOneField(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.CASCADE, related_name="meter"
    )
    key = models.OneToOneField(
        "api_keys.ApiKey", null=True, on_delete=models.CASCADE, related_name="meter"
    )
    version = models.PositiveBigIntegerField(default=0)
    # Begin of the minute, the day, and the first day of the month that the counters are for.
    minute = models.DateTimeField(null=True)
    day = models.DateField(null=True)
    month = models.DateField(null=True)
    minute_requests = models.PositiveBigIntegerField(default=0)
    minute_used = models.PositiveBigIntegerField(default=0)
    day_used = models.PositiveBigIntegerField(default=0)
    month_used = models.PositiveBigIntegerField(default=0)
    # Held for answers that run now and began in that minute, day or month.
    minute_reserved = models.PositiveBigIntegerField(default=0)
    day_reserved = models.PositiveBigIntegerField(default=0)
    month_reserved = models.PositiveBigIntegerField(default=0)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(user=None, key__isnull=False) | Q(user__isnull=False, key=None),
                name="meter_of_a_user_or_a_key",
            ),
        ]

    def __str__(self) -> str:
        return f"key {self.key_id}" if self.user_id is None else f"user {self.user_id}"

    def roll(self, minute: datetime, day: date) -> None:
        """Begin anew what another minute, day or month has replaced. Not saved."""
        if self.minute != minute:
            self.minute = minute
            self.minute_requests = self.minute_used = self.minute_reserved = 0
        if self.day != day:
            self.day = day
            self.day_used = self.day_reserved = 0
        if self.month != day.replace(day=1):
            self.month = day.replace(day=1)
            self.month_used = self.month_reserved = 0


class QuotaReservation(models.Model):
    """Tokens held for one running generation; the row goes when the generation is settled."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    key_id = models.BigIntegerField(null=True)
    minute = models.DateTimeField()
    day = models.DateField()
    tokens = models.PositiveBigIntegerField()
    # For the ledger, should the process end before it books.
    key_prefix = models.CharField(max_length=32, blank=True, default="")
    source = models.CharField(max_length=20, blank=True, default="")
    model = models.CharField(max_length=200, blank=True, default="")
    began_at = models.DateTimeField(default=timezone.now)
    # The server process that made it, and when that process last said that it lives.
    process_id = models.UUIDField()
    alive_at = models.DateTimeField(db_index=True)

    def __str__(self) -> str:
        return f"{self.tokens} tokens for user {self.user_id}"


class UsageRecord(models.Model):
    """The ledger: one row a generation, written when it ended or its process was found dead."""

    class End(models.TextChoices):
        STOP = "stop"
        LENGTH = "length"
        ABORT = "abort"
        ERROR = "error"

    # The reservation's id: a generation can be booked once only.
    reservation_id = models.UUIDField(unique=True, editable=False)
    # Empty where the process ended before it booked: what it made is not known.
    request_id = models.CharField(max_length=100)
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="usage_records"
    )
    # Kept as they were, so that the row still says who it was when the user or key is gone.
    username = models.CharField(max_length=150)
    key_id = models.BigIntegerField(null=True)
    key_prefix = models.CharField(max_length=32, blank=True)
    source = models.CharField(max_length=20)
    model = models.CharField(max_length=200)
    prompt_tokens = models.PositiveIntegerField()
    # Of the prompt tokens: found in the prefix cache.
    cached_tokens = models.PositiveIntegerField()
    completion_tokens = models.PositiveIntegerField()
    queue_s = models.FloatField()
    ttft_s = models.FloatField(null=True)
    duration_s = models.FloatField()
    end = models.CharField(max_length=10, choices=End.choices)
    # The day whose quota was charged.
    day = models.DateField()
    created_at = models.DateTimeField(auto_now_add=True, db_index=True)

    class Meta:
        indexes = [models.Index(fields=["user", "day"], name="usage_record_user_day")]

    def __str__(self) -> str:
        return f"{self.request_id}: {self.prompt_tokens} + {self.completion_tokens} tokens"


class UsageRollup(models.Model):
    """The ledger added up: one row an hour or a day, user, key, model and door.

    Rebuilt from the ledger by `rollup`, whole hours and days at a time; never added to.
    """

    class Span(models.TextChoices):
        HOUR = "hour"
        DAY = "day"

    span = models.CharField(max_length=4, choices=Span.choices)
    # The day that was charged, in the team's time zone; for an hour that of its first row.
    day = models.DateField()
    # Begin of the hour in which the row was written; None for a day.
    hour = models.DateTimeField(null=True)
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    username = models.CharField(max_length=150)
    key_id = models.BigIntegerField(null=True)
    key_prefix = models.CharField(max_length=32, blank=True)
    source = models.CharField(max_length=20)
    model = models.CharField(max_length=200)
    num_requests = models.PositiveBigIntegerField()
    prompt_tokens = models.PositiveBigIntegerField()
    cached_tokens = models.PositiveBigIntegerField()
    completion_tokens = models.PositiveBigIntegerField()

    class Meta:
        indexes = [
            models.Index(fields=["span", "day"], name="usage_rollup_day"),
            models.Index(fields=["span", "hour"], name="usage_rollup_hour"),
        ]

    def __str__(self) -> str:
        return f"{self.username}, {self.span} {self.hour or self.day}"


class RollupState(models.Model):
    """The one row that says up to when the ledger is added up; locked while it is."""

    done_until = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"until {self.done_until}"
