from django.conf import settings
from django.db import models
from django.utils import timezone


class AuditRecord(models.Model):
    """What an admin did to the running server: kept when the account is gone."""

    at = models.DateTimeField(default=timezone.now, db_index=True)
    actor = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    actor_name = models.CharField(max_length=150)
    # noun.verb: see audit.py
    action = models.CharField(max_length=40)
    # The request's id, the names of the settings, the user's or the key's name.
    target = models.CharField(max_length=200)
    # A change has {"before": {...}, "after": {...}}.
    detail = models.JSONField(default=dict)

    class Meta:
        ordering = ["-at", "-pk"]

    def __str__(self) -> str:
        return f"{self.actor_name} {self.action} {self.target}"


class LoadRow(models.Model):
    """The plotted numbers of one minute or one hour: see `load_history.py`."""

    # 60 or 3600
    span_s = models.PositiveIntegerField()
    # When it began.
    at = models.DateTimeField()
    # Column of `samples.COLUMNS` -> number or null
    values = models.JSONField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["span_s", "at"], name="console_load_once"),
        ]

    def __str__(self) -> str:
        return f"{self.span_s} s from {self.at:%Y-%m-%d %H:%M}"


class ShareWeight(models.Model):
    """How much of the server one member, or each member of a group, gets under load; else 1."""

    user = models.OneToOneField(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.CASCADE, related_name="+"
    )
    group = models.OneToOneField(
        "auth.Group", null=True, on_delete=models.CASCADE, related_name="+"
    )
    weight = models.FloatField()

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=models.Q(user=None, group__isnull=False)
                | models.Q(user__isnull=False, group=None),
                name="console_weight_has_one_subject",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.who} weighs {self.weight:g}"

    @property
    def who(self) -> str:
        if self.user is not None:
            return str(self.user.username)
        return f"group {self.group.name}" if self.group is not None else "nobody"
