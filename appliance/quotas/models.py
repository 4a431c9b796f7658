"""Who may use how many tokens a day, what is held for running answers, and the one ledger."""

import uuid

from django.conf import settings
from django.db import models
from django.db.models import Q


class QuotaRule(models.Model):
    """Tokens a day: one rule for everybody, and at most one for a user that goes before it."""

    is_default = models.BooleanField(default=False)
    user = models.OneToOneField(
        settings.AUTH_USER_MODEL,
        null=True,
        blank=True,
        on_delete=models.CASCADE,
        related_name="quota_rule",
    )
    # None is no limit.
    tokens_per_day = models.PositiveBigIntegerField(null=True, blank=True)
    changed_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    changed_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(is_default=True, user=None) | Q(is_default=False, user__isnull=False),
                name="quota_rule_is_for_all_or_for_one",
            ),
            models.UniqueConstraint(
                fields=["is_default"], condition=Q(is_default=True), name="quota_rule_one_default"
            ),
        ]

    def __str__(self) -> str:
        whose = "everybody" if self.user_id is None else f"user {self.user_id}"
        return f"{whose}: {self.tokens_per_day or 'no limit'}"


class UsageDay(models.Model):
    """Counters of one user and day (the team's time zone). Changed by conditional UPDATE only."""

    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="usage_days"
    )
    day = models.DateField()
    used_tokens = models.PositiveBigIntegerField(default=0)
    # Held for answers that run now; the sum of this day's QuotaReservation rows.
    reserved_tokens = models.PositiveBigIntegerField(default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["user", "day"], name="usage_day_once"),
        ]

    def __str__(self) -> str:
        return f"user {self.user_id} on {self.day}"


class QuotaReservation(models.Model):
    """Tokens held for one running generation; the row goes when the generation is settled."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    day = models.DateField()
    tokens = models.PositiveBigIntegerField()
    # The server process that made it, and when that process last said that it lives.
    process_id = models.UUIDField()
    alive_at = models.DateTimeField(db_index=True)

    def __str__(self) -> str:
        return f"{self.tokens} tokens for user {self.user_id}"


class UsageRecord(models.Model):
    """The ledger: one row a generation, written when it ended, never changed."""

    class End(models.TextChoices):
        STOP = "stop"
        LENGTH = "length"
        ABORT = "abort"
        ERROR = "error"

    # The reservation's id: a generation can be booked once only.
    reservation_id = models.UUIDField(unique=True, editable=False)
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
