"""Token quotas and rate limits: reserve before a generation, settle with the true counts after it.

A reservation locks the caller's meters, checks every limit, and writes with one UPDATE that names
the version it read, so that requests at the same instant, in any number of processes, on SQLite and
PostgreSQL alike, cannot pass a limit together. Blocking: call from worker threads.
"""

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta

from django.db import OperationalError, transaction
from django.db.models import F, Q
from django.utils import timezone

from appliance.accounts.models import User
from appliance.errors import ApplianceError, QuotaExceeded, RateLimited
from appliance.quotas.limits import minute_of, quota_day, window_resets_at
from appliance.quotas.models import Meter, QuotaReservation, RollupState, UsageRecord
from appliance.quotas.rules import Limit, limits_of

# An answer is cut to what is left of the day or month only if this much of it remains.
LEAST_ANSWER_TOKENS = 16
# Reservations of a process that has not said for this long that it lives are given back.
STALE_AFTER = timedelta(minutes=10)
# A clock that was set back by less than this does not open the minutes that have passed again.
_CLOCK_SLACK = timedelta(minutes=5)

# Marks this process's reservations.
PROCESS_ID = uuid.uuid4()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Tokens held for one generation. `completion_tokens` may be less than what was asked for."""

    id: uuid.UUID
    user_id: int
    key_id: int | None
    minute: datetime
    day: date
    prompt_tokens: int
    completion_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one generation really took, for the ledger."""

    request_id: str
    username: str
    source: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float
    ttft_s: float | None
    duration_s: float
    end: str
    key_id: int | None = None
    key_prefix: str = ""


# ---- reserve


def quota_reserve(
    user_id: int,
    *,
    prompt_tokens: int,
    completion_tokens: int,
    least_completion_tokens: int = LEAST_ANSWER_TOKENS,
    key_id: int | None = None,
    limits: Sequence[Limit] | None = None,
    key_prefix: str = "",
    source: str = "",
    model: str = "",
) -> Reservation:
    """Count one request and hold its tokens in the minute, day and month of user and key.

    When prompt and whole answer do not fit into the day or month, but the prompt and at least
    `least_completion_tokens` of the answer do, all that is left is held and the answer must be cut
    to the returned `completion_tokens`. A minute cuts an answer only to what a whole minute allows.

    Args:
        limits: those of `limits_of`, if they were read already.
        key_prefix, source, model: for the ledger, should this process end before it books.

    Raises:
        RateLimited: this minute is used up; `retry_after_s` reaches to the next.
        QuotaExceeded: this day or month is; or no minute, day or month is large enough, and then
            without `retry_after_s`.
    """
    if limits is None:
        limits = limits_of(user_id, key_id)
    asked = _Asked(prompt_tokens, completion_tokens, least_completion_tokens)
    with transaction.atomic():
        meters = _locked(user_id, key_id)
        now = _now(meters)
        minute, day = minute_of(now), quota_day(now)
        for meter in meters:
            meter.roll(minute, day)
        for limit in limits:
            meter = meters[-1] if limit.of_key else meters[0]
            asked.check(limit, meter, now)
        if asked.refusals:
            raise _worst(asked.refusals)
        tokens = prompt_tokens + asked.completion_tokens
        for meter in meters:
            meter.minute_requests += 1
            _add(meter, "reserved", tokens, minute, day)
            _write(meter)
        made = QuotaReservation.objects.create(
            user_id=user_id,
            key_id=key_id,
            minute=minute,
            day=day,
            tokens=tokens,
            key_prefix=key_prefix,
            source=source,
            model=model,
            process_id=PROCESS_ID,
            alive_at=timezone.now(),
        )
    return Reservation(
        id=made.id,
        user_id=user_id,
        key_id=key_id,
        minute=minute,
        day=day,
        prompt_tokens=prompt_tokens,
        completion_tokens=asked.completion_tokens,
    )


class _Asked:
    """One request held against limit after limit; its answer shrinks to what they allow."""

    def __init__(self, prompt_tokens: int, completion_tokens: int, least: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._wanted_tokens = prompt_tokens + completion_tokens
        self._least_tokens = prompt_tokens + min(least, completion_tokens)
        self.completion_tokens = completion_tokens
        self.refusals: list[ApplianceError] = []

    def check(self, limit: Limit, meter: Meter, now: datetime) -> None:
        window = limit.kind.window
        if limit.name == "requests_per_minute":
            if meter.minute_requests >= limit.value:
                used = f"{meter.minute_requests:,} began in this minute"
                self._refuse(limit, meter, now, used, never=limit.value == 0)
        elif window:
            used = getattr(meter, f"{window}_used")
            reserved = getattr(meter, f"{window}_reserved")
            left = limit.value - used - reserved
            needed = self._least_tokens
            if window == "minute":
                needed = max(needed, min(self._wanted_tokens, limit.value))
            if needed > left:
                held = f", {reserved:,} held by running answers" if reserved else ""
                text = f"{used:,} used{held}, and this request needs at least {needed:,}"
                self._refuse(limit, meter, now, text, never=needed > limit.value)
            self.completion_tokens = min(self.completion_tokens, left - self._prompt_tokens)

    def _refuse(self, limit: Limit, meter: Meter, now: datetime, used: str, *, never: bool) -> None:
        if never:
            text = (
                f"The limit of {limit.words} allows no request like this one, at no time: {used}. "
                "Shorten it, or ask an admin for a larger limit."
            )
            self.refusals.append(QuotaExceeded(text))
            return
        resets_at = window_resets_at(limit.kind.window, meter.minute, meter.day)
        retry_after_s = max(1, math.ceil((resets_at - now).total_seconds()) + 1)
        local = timezone.localtime(resets_at, timezone.get_default_timezone())
        text = f"The limit of {limit.words} is reached: {used}. "
        if limit.kind.window == "minute":
            text += f"It starts anew at {local:%H:%M} ({local:%Z})."
            subject = f"key:{meter.key_id}" if limit.of_key else f"user:{meter.user_id}"
            refusal: ApplianceError = RateLimited(
                text, retry_after_s=retry_after_s, max_wait_s=limit.wait_s, subject=subject
            )
        else:
            text += f"It starts anew on {local:%d %b at %H:%M} ({local:%Z})."
            refusal = QuotaExceeded(text, retry_after_s=retry_after_s)
        self.refusals.append(refusal)


def _worst(refusals: Sequence[ApplianceError]) -> ApplianceError:
    """What keeps the request away longest: waiting for another would not help."""
    return max(refusals, key=lambda each: (each.retry_after_s is None, each.retry_after_s or 0))


# ---- settle, release


def quota_settle(reservation: Reservation, usage: Usage) -> bool:
    """Book what a generation really took and give the rest back; False if it was booked before.

    Safe to repeat after a database error: either all of it happened or nothing.
    """
    with transaction.atomic():
        record, booked = UsageRecord.objects.get_or_create(
            reservation_id=reservation.id,
            defaults={
                "user": User.objects.filter(pk=reservation.user_id).first(),
                "day": reservation.day,
                **{name: getattr(usage, name) for name in Usage.__slots__},
            },
        )
        if not booked:
            if record.request_id:
                return False
            _correct(record, usage)
        # A slow process may have been taken for dead: then nothing is held any more.
        held = _take_back(reservation.id)
        used = usage.prompt_tokens + usage.completion_tokens
        _count(reservation, reserved=-held.tokens if held else 0, used=used)
    return True


def _correct(record: UsageRecord, usage: Usage) -> None:
    """The process was only slow: what it made takes the place of what was taken for lost."""
    for name in Usage.__slots__:
        setattr(record, name, getattr(usage, name))
    record.save()
    # The hour and day of the row are added up again.
    RollupState.objects.filter(done_until__gt=record.created_at).update(
        done_until=record.created_at
    )


def quota_release(reservation: Reservation) -> None:
    """Give everything back: the generation never began. Safe to repeat."""
    with transaction.atomic():
        if held := _take_back(reservation.id):
            _count(held, reserved=-held.tokens, requests=-1)


def _take_back(reservation_id: uuid.UUID) -> QuotaReservation | None:
    """Delete the row, once, for the caller to count it; None if that was done. In a transaction."""
    held = QuotaReservation.objects.select_for_update().filter(pk=reservation_id).first()
    if held is None or not QuotaReservation.objects.filter(pk=held.pk).delete()[0]:
        return None
    return held


def _count(
    about: Reservation | QuotaReservation, *, reserved: int, used: int = 0, requests: int = 0
) -> None:
    """Change the meters in the windows of a reservation that still run. In a transaction."""
    for meter in _locked(about.user_id, about.key_id, make=False):
        _add(meter, "reserved", reserved, about.minute, about.day)
        _add(meter, "used", used, about.minute, about.day)
        if meter.minute == about.minute:
            meter.minute_requests = max(0, meter.minute_requests + requests)
        _write(meter)


# ---- meters, inside a transaction


def _locked(user_id: int, key_id: int | None, *, make: bool = True) -> list[Meter]:
    """The meter of the user, then that of the key, locked in an order that cannot deadlock."""
    wanted = Q(user_id=user_id) | (Q(key_id=key_id) if key_id is not None else Q(pk=None))
    rows = Meter.objects.select_for_update().filter(wanted).order_by("pk")
    found = list(rows)
    if make and len(found) < (1 if key_id is None else 2):
        missing = [Meter(user_id=user_id)]
        if key_id is not None:
            missing.append(Meter(key_id=key_id))
        Meter.objects.bulk_create(missing, ignore_conflicts=True)
        found = list(rows.all())
    return sorted(found, key=lambda meter: meter.key_id is not None)


def _now(meters: Sequence[Meter]) -> datetime:
    """Never before the newest minute that was counted: a passed minute does not open again."""
    now = timezone.now()
    newest = max((meter.minute for meter in meters if meter.minute), default=now)
    return newest if now < newest < now + _CLOCK_SLACK else now


def _add(meter: Meter, what: str, tokens: int, minute: datetime, day: date) -> None:
    """Add to the windows that still are those of `minute` and `day`; the others are over."""
    same = {
        "minute": meter.minute == minute,
        "day": meter.day == day,
        "month": meter.month == day.replace(day=1),
    }
    for window, is_same in same.items():
        if is_same:
            name = f"{window}_{what}"
            setattr(meter, name, max(0, getattr(meter, name) + tokens))


_COUNTERS = tuple(
    field.name
    for field in Meter._meta.concrete_fields
    if field.name not in ("id", "user", "key", "version")
)


def _write(meter: Meter) -> None:
    values = {name: getattr(meter, name) for name in _COUNTERS}
    row = Meter.objects.filter(pk=meter.pk, version=meter.version)
    written = row.update(version=F("version") + 1, **values)
    if written != 1:
        # Cannot be under a lock; a booking is tried again.
        raise OperationalError("a meter was written under its lock")
    meter.version += 1


# ---- reservations of processes that died


def quota_mark_alive() -> None:
    """Say that this process still lives and its reservations count. To be called every minute."""
    QuotaReservation.objects.filter(process_id=PROCESS_ID).update(alive_at=timezone.now())


def quota_heal(*, all_others: bool = False) -> int:
    """Give back what dead processes held, and book it as aborted; returns how many it were.

    With `all_others` every reservation that this process did not make counts as dead: for the
    start of the server, which is the only one on its data.
    """
    dead = QuotaReservation.objects.exclude(process_id=PROCESS_ID)
    if not all_others:
        dead = dead.filter(alive_at__lt=timezone.now() - STALE_AFTER)
    healed = 0
    for reservation_id in dead.values_list("pk", flat=True):
        with transaction.atomic():
            if held := _take_back(reservation_id):
                _count(held, reserved=-held.tokens)
                _book_lost(held)
                healed += 1
    return healed


def _book_lost(held: QuotaReservation) -> None:
    """The ledger's row of a generation whose process died: nobody knows what it made."""
    UsageRecord.objects.get_or_create(
        reservation_id=held.pk,
        defaults={
            "request_id": "",
            "user_id": held.user_id,
            "username": held.user.username,
            "key_id": held.key_id,
            "key_prefix": held.key_prefix,
            "source": held.source,
            "model": held.model,
            "prompt_tokens": 0,
            "cached_tokens": 0,
            "completion_tokens": 0,
            "queue_s": 0.0,
            "ttft_s": None,
            "duration_s": max(0.0, (held.alive_at - held.began_at).total_seconds()),
            "end": UsageRecord.End.ABORT,
            "day": held.day,
        },
    )
