from django.contrib.auth.models import AbstractUser
from django.db import models

NUM_HUES = 8
NUM_SHAPES = 4


class User(AbstractUser):
    """A member of the team. Admins have `is_staff`: they see the console and add members."""

    # The user's mark on the block map: given once at creation, never changed.
    mark_hue = models.PositiveSmallIntegerField(default=1)
    mark_shape = models.PositiveSmallIntegerField(default=0)

    @property
    def is_admin(self) -> bool:
        return self.is_staff or self.is_superuser
