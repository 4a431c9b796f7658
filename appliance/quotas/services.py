"""Daily token quotas: reserve before a generation, settle with the true counts after it.

Every change of a counter is one conditional UPDATE inside a short transaction, never a value that
was read before, so that requests at the same instant, in any number of processes, cannot pass a
limit together. Blocking: call from worker threads.
"""

import math
import uuid
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta

from django.db import transaction
from django.db.models import F, Q, Value
from django.utils import timezone

from appliance.accounts.acts import act_done
from appliance.accounts.models import User
from appliance.errors import BadRequest, QuotaExceeded
from appliance.quotas.models import QuotaReservation, QuotaRule, UsageDay, UsageRecord

# The rule for everybody until an admin sets another.
DEFAULT_TOKENS_PER_DAY = 5_000_000
MAX_TOKENS_PER_DAY = 10**15
# An answer is cut to what is left of the quota only if this much of it remains.
LEAST_ANSWER_TOKENS = 16
# Reservations of a process that has not said for this long that it lives are given back.
STALE_AFTER = timedelta(minutes=10)

# Marks this process's reservations.
PROCESS_ID = uuid.uuid4()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaStatus:
    # None is no limit.
    limit_tokens: int | None
    used_tokens: int
    reserved_tokens: int
    # None without a limit; else what a new request may still reserve.
    left_tokens: int | None
    resets_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Tokens held for one generation. `completion_tokens` may be less than what was asked for."""

    id: uuid.UUID
    user_id: int
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


# ---- the day


def quota_day(now: datetime | None = None) -> date:
    """The day that is charged: the calendar day of the team's time zone."""
    return timezone.localdate(now, timezone.get_default_timezone())


def quota_resets_at(day: date) -> datetime:
    """The first moment of the next day, right also when the clocks change that night."""
    midnight = datetime.combine(day + timedelta(days=1), time.min)
    return midnight.replace(tzinfo=timezone.get_default_timezone())


# ---- rules


def quota_limit(user_id: int) -> int | None:
    """Tokens a day of this user: the own rule, else the one for everybody; None is no limit."""
    rules = {
        rule.user_id: rule.tokens_per_day
        for rule in QuotaRule.objects.filter(Q(user_id=user_id) | Q(is_default=True))
    }
    if user_id in rules:
        return rules[user_id]
    return rules.get(None, DEFAULT_TOKENS_PER_DAY)


def quota_default_limit() -> int | None:
    rule = QuotaRule.objects.filter(is_default=True).first()
    return DEFAULT_TOKENS_PER_DAY if rule is None else rule.tokens_per_day


def quota_rule_set(user: User | None, tokens_per_day: int | None, *, by: User | None) -> QuotaRule:
    """Set the rule of `user`, or with None the rule for everybody; None tokens is no limit.

    It counts at once, also for the day that runs. Raises BadRequest for a number out of range.
    """
    fits = tokens_per_day is None or (
        isinstance(tokens_per_day, int)
        and not isinstance(tokens_per_day, bool)
        and 0 <= tokens_per_day <= MAX_TOKENS_PER_DAY
    )
    if not fits:
        raise BadRequest(
            f"tokens_per_day is {tokens_per_day!r}; a whole number from 0 to "
            f"{MAX_TOKENS_PER_DAY:,}, or none for no limit, is allowed.",
            param="tokens_per_day",
        )
    with transaction.atomic():
        before = quota_default_limit() if user is None else quota_limit(user.pk)
        rule, _ = QuotaRule.objects.update_or_create(
            user=user,
            is_default=user is None,
            defaults={"tokens_per_day": tokens_per_day, "changed_by": by},
        )
        _rule_changed(by, "quota.set", user, before, tokens_per_day)
    return rule


def quota_rule_clear(user: User, *, by: User | None = None) -> None:
    """Let the rule for everybody hold for `user` again."""
    with transaction.atomic():
        before = quota_limit(user.pk)
        if QuotaRule.objects.filter(user=user).delete()[0]:
            _rule_changed(by, "quota.clear", user, before, quota_default_limit())


def _rule_changed(
    by: User | None, action: str, user: User | None, before: int | None, after: int | None
) -> None:
    act_done(
        by,
        action,
        user.username if user else "everybody",
        before={"tokens_per_day": before},
        after={"tokens_per_day": after},
    )


def quota_status(user: User | int) -> QuotaStatus:
    user_id = user if isinstance(user, int) else user.pk
    day = quota_day()
    limit = quota_limit(user_id)
    row = UsageDay.objects.filter(user_id=user_id, day=day).first()
    used, reserved = (row.used_tokens, row.reserved_tokens) if row else (0, 0)
    return QuotaStatus(
        limit_tokens=limit,
        used_tokens=used,
        reserved_tokens=reserved,
        left_tokens=None if limit is None else max(0, limit - used - reserved),
        resets_at=quota_resets_at(day),
    )


# ---- reserve, settle, release


def quota_reserve(
    user_id: int,
    *,
    prompt_tokens: int,
    completion_tokens: int,
    least_completion_tokens: int = LEAST_ANSWER_TOKENS,
) -> Reservation:
    """Hold the tokens of one generation in today's quota.

    When prompt and whole answer do not fit, but the prompt and at least `least_completion_tokens`
    of the answer do, all that is left is held and the answer must be cut to the returned
    `completion_tokens`.

    Raises:
        QuotaExceeded: not even that fits; `retry_after_s` reaches to the reset.
    """
    day = quota_day()
    limit = quota_limit(user_id)
    with transaction.atomic():
        UsageDay.objects.bulk_create([UsageDay(user_id=user_id, day=day)], ignore_conflicts=True)
        row = UsageDay.objects.filter(user_id=user_id, day=day)
        if not _hold(row, prompt_tokens + completion_tokens, limit):
            state = row.select_for_update().get()
            left = limit - state.used_tokens - state.reserved_tokens
            cut = min(left - prompt_tokens, completion_tokens)
            if cut < least_completion_tokens:
                raise _exceeded(limit, state, prompt_tokens + least_completion_tokens)
            held = _hold(row, prompt_tokens + cut, limit)
            assert held, "the row was locked, so what is left cannot have shrunk"
            completion_tokens = cut
        made = QuotaReservation.objects.create(
            user_id=user_id,
            day=day,
            tokens=prompt_tokens + completion_tokens,
            process_id=PROCESS_ID,
            alive_at=timezone.now(),
        )
    return Reservation(
        id=made.id,
        user_id=user_id,
        day=day,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
    )


def _hold(row, tokens: int, limit: int | None) -> bool:
    """Add to the reserved tokens if the limit allows it: one statement, so no window."""
    if limit is not None:
        row = row.filter(used_tokens__lte=Value(limit - tokens) - F("reserved_tokens"))
    return row.update(reserved_tokens=F("reserved_tokens") + tokens) == 1


def _exceeded(limit: int, state: UsageDay, needed: int) -> QuotaExceeded:
    resets_at = quota_resets_at(state.day)
    if needed > limit:
        return QuotaExceeded(
            f"This request needs at least {needed:,} tokens, more than your quota of {limit:,} "
            "tokens a day. Shorten it, or ask an admin for a larger quota."
        )
    held = f", {state.reserved_tokens:,} held by running answers" if state.reserved_tokens else ""
    return QuotaExceeded(
        f"Your quota of {limit:,} tokens a day does not allow this request: "
        f"{state.used_tokens:,} used{held}, and it needs at least {needed:,}. "
        f"The quota starts anew on {resets_at:%d %b at %H:%M} ({resets_at:%Z}).",
        retry_after_s=max(1, math.ceil((resets_at - timezone.now()).total_seconds()) + 1),
    )


def quota_settle(reservation: Reservation, usage: Usage) -> bool:
    """Book what a generation really took and give the rest back; False if it was booked before.

    Safe to repeat after a database error: either all of it happened or nothing.
    """
    with transaction.atomic():
        _, booked = UsageRecord.objects.get_or_create(
            reservation_id=reservation.id,
            defaults={
                "user": User.objects.filter(pk=reservation.user_id).first(),
                "day": reservation.day,
                **{name: getattr(usage, name) for name in Usage.__slots__},
            },
        )
        if not booked:
            return False
        _give_back(reservation.id)
        UsageDay.objects.filter(user_id=reservation.user_id, day=reservation.day).update(
            used_tokens=F("used_tokens") + usage.prompt_tokens + usage.completion_tokens
        )
    return True


def quota_release(reservation: Reservation) -> None:
    """Give everything back: the generation never began. Safe to repeat."""
    with transaction.atomic():
        _give_back(reservation.id)


def _give_back(reservation_id: uuid.UUID) -> int:
    """Tokens given back; 0 when that happened before. Inside a transaction."""
    held = QuotaReservation.objects.select_for_update().filter(pk=reservation_id).first()
    if held is None or not QuotaReservation.objects.filter(pk=held.pk).delete()[0]:
        return 0
    UsageDay.objects.filter(user_id=held.user_id, day=held.day).update(
        reserved_tokens=F("reserved_tokens") - held.tokens
    )
    return held.tokens


# ---- reservations of processes that died


def quota_mark_alive() -> None:
    """Say that this process still lives and its reservations count. To be called every minute."""
    QuotaReservation.objects.filter(process_id=PROCESS_ID).update(alive_at=timezone.now())


def quota_heal(*, all_others: bool = False) -> int:
    """Give back what dead processes held; returns the number of reservations.

    With `all_others` every reservation that this process did not make counts as dead: for the
    start of the server, which is the only one on its data.
    """
    dead = QuotaReservation.objects.exclude(process_id=PROCESS_ID)
    if not all_others:
        dead = dead.filter(alive_at__lt=timezone.now() - STALE_AFTER)
    healed = 0
    for reservation_id in dead.values_list("pk", flat=True):
        with transaction.atomic():
            healed += bool(_give_back(reservation_id))
    return healed
