from collections import Counter
from typing import Any

from django.contrib.auth.models import AbstractUser
from django.contrib.auth.models import UserManager as DjangoUserManager
from django.db import models
from django.utils import timezone

NUM_HUES = 8
NUM_SHAPES = 4


class UserManager(DjangoUserManager["User"]):
    use_in_migrations = False

    def next_mark(self) -> tuple[int, int]:
        """The mark held by the fewest users; among equals hues go before shapes."""
        held = Counter(self.values_list("mark_hue", "mark_shape"))
        marks = [(hue, shape) for shape in range(NUM_SHAPES) for hue in range(1, NUM_HUES + 1)]
        return min(marks, key=lambda mark: held[mark])

    def create_superuser(self, *args: Any, **kwargs: Any) -> "User":
        """For Django's own command, which knows no marks."""
        hue, shape = self.next_mark()
        return super().create_superuser(*args, mark_hue=hue, mark_shape=shape, **kwargs)


class User(AbstractUser):
    """A member of the team. Admins have `is_staff`: they see the console and add members."""

    # The user's mark on the block map: given once at creation, never changed.
    mark_hue = models.PositiveSmallIntegerField(default=1)
    mark_shape = models.PositiveSmallIntegerField(default=0)
    # An account for scripts that belong to nobody: no sign-in, never an admin.
    is_service = models.BooleanField(default=False)
    # Written at most once a minute: see services.user_seen.
    last_seen_at = models.DateTimeField(null=True, blank=True)

    objects = UserManager()

    @property
    def shown_name(self) -> str:
        """The name where people tell users apart."""
        return f"{self.username} (service)" if self.is_service else self.username

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
