from django.conf import settings
from django.db import models
from django.utils import timezone

# What a key may do, with the words people read on the account page.
SCOPES = {
    "chat": "generate",
    "models": "list models",
    "admin": "run the engine",
}


class KeyRules(models.Model):
    """What holds for new keys of everybody: at most one row; without one the defaults hold."""

    max_live_keys = models.PositiveIntegerField(default=50)
    # None: a key needs no end.
    max_life_days = models.PositiveIntegerField(null=True, blank=True)

    def __str__(self) -> str:
        return f"{self.max_live_keys} keys, {self.max_life_days or 'any'} days"


class ApiKey(models.Model):
    """A script's way in. The secret itself is not kept, only its keyed digest."""

    # The first letters of the secret, to tell keys apart. Not unique.
    prefix = models.CharField(max_length=16)
    digest = models.CharField(max_length=64, unique=True)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="api_keys"
    )
    name = models.CharField(max_length=80)
    scopes = models.JSONField(default=list)
    # Model names; empty means every model.
    allowed_models = models.JSONField(default=list, blank=True)
    # Networks in CIDR form; empty means from anywhere.
    allowed_networks = models.JSONField(default=list, blank=True)
    # The secret before the last rotation, which still opens until then.
    old_prefix = models.CharField(max_length=16, blank=True)
    old_digest = models.CharField(max_length=64, unique=True, null=True, blank=True)
    old_until = models.DateTimeField(null=True, blank=True)
    rotated_at = models.DateTimeField(null=True, blank=True)
    # What its requests are booked and queued as; see `appliance.serving.types`. Other than "api"
    # only for keys that the server makes for itself.
    source = models.CharField(max_length=20, default="api")
    generation_class = models.CharField(max_length=20, default="api")
    created_at = models.DateTimeField(default=timezone.now)
    # None: no end.
    expires_at = models.DateTimeField(null=True, blank=True)
    # Written at most once a minute.
    last_used_at = models.DateTimeField(null=True, blank=True)
    last_used_from = models.GenericIPAddressField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-created_at", "-pk"]

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix})"

    @property
    def is_live(self) -> bool:
        """Neither revoked nor expired."""
        return self.revoked_at is None and not self.is_expired

    @property
    def is_expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= timezone.now()

    @property
    def has_old_secret(self) -> bool:
        """Whether the secret before the last rotation still opens."""
        return self.old_until is not None and self.old_until > timezone.now()

    @property
    def scope_names(self) -> list[str]:
        return [SCOPES.get(scope, scope) for scope in self.scopes]
