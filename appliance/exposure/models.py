from django.conf import settings
from django.db import models


class ExposureSettings(models.Model):
    """Where the server listens and who may reach it: one row, made at the first start."""

    bind_host = models.CharField(max_length=255)
    port = models.PositiveIntegerField()
    # Names under which people reach the server, beside those of this machine itself.
    allowed_hosts = models.JSONField(default=list, blank=True)
    # Networks whose addresses may call. Empty: any on a loopback bind, else private networks.
    allowed_networks = models.JSONField(default=list, blank=True)
    # Reverse proxies whose word about the caller's address and scheme is believed.
    trusted_proxies = models.JSONField(default=list, blank=True)
    changed_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    changed_at = models.DateTimeField(auto_now=True)

    def __str__(self) -> str:
        return f"{self.bind_host}:{self.port}"


class ExposureTrial(models.Model):
    """A change that is taken back at `ends_at` unless an admin keeps it: at most one row."""

    # The changed fields as they were, and as they are on trial.
    before = models.JSONField()
    after = models.JSONField()
    by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    ends_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{', '.join(self.after)} until {self.ends_at}"
