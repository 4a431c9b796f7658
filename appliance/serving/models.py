from django.conf import settings
from django.db import models


class EngineSetting(models.Model):
    """A live setting that an admin chose; the engine starts with it the next time."""

    name = models.CharField(max_length=100, unique=True)
    value = models.JSONField()
    # Counts the changes of this setting.
    version = models.PositiveIntegerField(default=1)
    changed_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    changed_at = models.DateTimeField(auto_now=True)

    def __str__(self) -> str:
        return f"{self.name} = {self.value!r}"


class WorkerSign(models.Model):
    """When the background worker last did its work. One row."""

    at = models.DateTimeField()

    def __str__(self) -> str:
        return f"worker at {self.at}"
