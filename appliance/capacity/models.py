from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils import timezone


class CapacityRun(models.Model):
    """One capacity test, asked for on the console's page and run by the background worker."""

    class Status(models.TextChoices):
        QUEUED = "queued", "waiting for the worker"
        RUNNING = "running", "running"
        DONE = "done", "done"
        STOPPED = "stopped", "stopped"
        FAILED = "failed", "failed"

    status = models.CharField(max_length=10, choices=Status.choices, default=Status.QUEUED)
    # Queued or running. A column of its own, so that the database allows one only.
    is_open = models.BooleanField(default=True)
    created_at = models.DateTimeField(default=timezone.now, db_index=True)
    started_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)
    # When the worker last said that it lives.
    alive_at = models.DateTimeField(default=timezone.now)
    started_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    started_by_name = models.CharField(max_length=150)
    # What was asked for: see `appliance.capacity.plan.Plan`.
    plan = models.JSONField(default=dict)
    # Median lengths of the mix, model: what a comparison needs to be fair.
    facts = models.JSONField(default=dict)
    progress = models.JSONField(default=dict)
    stop_asked = models.BooleanField(default=False)
    # Why it stopped or failed, for people.
    reason = models.TextField(blank=True)
    # The test's own key, revoked at its end.
    key_id = models.BigIntegerField(null=True)
    # Set while the test holds the slots at another number than before: {"before", "set"}.
    slots = models.JSONField(null=True)

    class Meta:
        ordering = ["-created_at", "-pk"]
        constraints = [
            models.UniqueConstraint(
                fields=["is_open"], condition=Q(is_open=True), name="capacity_one_open_run"
            ),
        ]

    def __str__(self) -> str:
        return f"capacity test {self.pk}: {self.status}"


class CapacityLevel(models.Model):
    """The figures of one number of users: see `appliance.capacity.figures.Level`."""

    run = models.ForeignKey(CapacityRun, on_delete=models.CASCADE, related_name="level_rows")
    users = models.PositiveIntegerField()
    figures = models.JSONField()

    class Meta:
        ordering = ["users"]
        constraints = [
            models.UniqueConstraint(fields=["run", "users"], name="capacity_level_once"),
        ]

    def __str__(self) -> str:
        return f"{self.users} users of run {self.run_id}"
