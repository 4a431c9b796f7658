from django.contrib.auth.models import AbstractUser
from django.db import models
from django.utils import timezone

NUM_HUES = 8
NUM_SHAPES = 4


class User(AbstractUser):
    """A member of the team. Admins have `is_staff`: they see the console and add members."""

    # The user's mark on the block map: given once at creation, never changed.
    mark_hue = models.PositiveSmallIntegerField(default=1)
    mark_shape = models.PositiveSmallIntegerField(default=0)
    # Written at most once a minute: see services.user_seen.
    last_seen_at = models.DateTimeField(null=True, blank=True)

    @property
    def is_admin(self) -> bool:
        return self.is_staff or self.is_superuser


class OneTimeLink(models.Model):
    """A link that opens one form once: the first set-up, or choosing a password.

    Only the digest of its token is kept, so a copy of the database opens nothing.
    """

    class Kind(models.TextChoices):
        SETUP = "setup"
        INVITE = "invite"
        RESET = "reset"

    kind = models.CharField(max_length=8, choices=Kind.choices)
    digest = models.CharField(max_length=64, unique=True)
    # None for the first set-up: that user does not exist yet.
    user = models.ForeignKey(
        User, null=True, blank=True, on_delete=models.CASCADE, related_name="one_time_links"
    )
    created_at = models.DateTimeField(default=timezone.now)
    # None: open until used.
    expires_at = models.DateTimeField(null=True, blank=True)
    used_at = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return f"{self.kind} link {self.pk}"
