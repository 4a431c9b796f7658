"""Whether the background worker does its work: it signs every few seconds, the server looks.

The row says more than a living process would: clock, broker and database of the worker all did
their part, wherever it runs.
"""

import time
from datetime import timedelta

from django.utils import timezone

from appliance.serving.models import WorkerSign

# A long task does not hold the sign up, a busy machine may.
MISSING_AFTER = timedelta(seconds=120)
# What a worker may take to its first sign after the server began to serve.
FIRST_SIGN_S = 180.0

_ONLY_ROW = 1
_expected_since_s: float | None = None


def worker_expect() -> None:
    """From now on a worker has to be there; before, nobody misses it."""
    global _expected_since_s
    _expected_since_s = time.monotonic()


def worker_sign() -> None:
    """Blocking; by the worker."""
    WorkerSign.objects.update_or_create(pk=_ONLY_ROW, defaults={"at": timezone.now()})


def worker_is_missing(now_s: float | None = None) -> bool:
    """Blocking. `now_s` in monotonic seconds."""
    now_s = time.monotonic() if now_s is None else now_s
    if _expected_since_s is None or now_s - _expected_since_s < FIRST_SIGN_S:
        return False
    return not WorkerSign.objects.filter(at__gt=timezone.now() - MISSING_AFTER).exists()
