"""The kinds of limits: their words, ranges, and how long a day and a month last. No database."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta

from django.utils import timezone

# A request may wait at most this long for a limit: proxies in between give up soon after.
MAX_WAIT_S = 120
MAX_TOKENS = 10**15


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitKind:
    name: str
    # As in “the limit of 20 requests a minute”.
    unit: str
    help: str
    low: int
    high: int
    # Whether waiting can help: the turn comes within minutes.
    can_wait: bool = False
    # The window whose counters it goes by; "" for limits on what runs now or on one request.
    window: str = ""

    @property
    def label(self) -> str:
        return self.unit[:1].upper() + self.unit[1:]

    def words(self, value: int) -> str:
        if self.name == "slot_share":
            return f"{value} % of the slots"
        unit = self.unit
        if value == 1:
            unit = unit.replace("requests", "request", 1).replace("tokens", "token", 1)
        return f"{value:,} {unit}"


LIMIT_KINDS: Mapping[str, LimitKind] = {
    kind.name: kind
    for kind in (
        LimitKind(
            name="requests_per_minute",
            unit="requests a minute",
            help="Answers that begin in one minute of the clock; n=4 counts as four.",
            low=0,
            high=1_000_000,
            can_wait=True,
            window="minute",
        ),
        LimitKind(
            name="tokens_per_minute",
            unit="tokens a minute",
            help="Prompts and answers that begin in one minute of the clock.",
            low=0,
            high=MAX_TOKENS,
            can_wait=True,
            window="minute",
        ),
        LimitKind(
            name="tokens_per_day",
            unit="tokens a day",
            help="Prompts and answers of a day of the team's time zone.",
            low=0,
            high=MAX_TOKENS,
            window="day",
        ),
        LimitKind(
            name="tokens_per_month",
            unit="tokens a month",
            help="Prompts and answers of a calendar month of the team's time zone.",
            low=0,
            high=MAX_TOKENS,
            window="month",
        ),
        LimitKind(
            name="concurrent_requests",
            unit="requests at a time",
            help="Answers that run or wait in the engine at the same time.",
            low=0,
            high=4096,
            can_wait=True,
        ),
        LimitKind(
            name="context_tokens",
            unit="tokens in one request",
            help="Prompt and answer of one request together.",
            low=1,
            high=100_000_000,
        ),
        LimitKind(
            name="slot_share",
            unit="percent of the slots",
            help="Of the slots in effect, rounded down, one at least.",
            low=1,
            high=100,
            can_wait=True,
        ),
    )
}


# ---- the minute, the day and the month


def minute_of(now: datetime) -> datetime:
    return now.replace(second=0, microsecond=0)


def quota_day(now: datetime | None = None) -> date:
    """The day that is charged: the calendar day of the team's time zone."""
    return timezone.localdate(now, timezone.get_default_timezone())


def quota_resets_at(day: date) -> datetime:
    """The first moment of the next day, right also when the clocks change that night."""
    return _midnight(day + timedelta(days=1))


def month_resets_at(day: date) -> datetime:
    """The first moment of the month after that of `day`."""
    return _midnight((day.replace(day=1) + timedelta(days=32)).replace(day=1))


def window_resets_at(window: str, minute: datetime, day: date) -> datetime:
    if window == "minute":
        return minute + timedelta(minutes=1)
    return quota_resets_at(day) if window == "day" else month_resets_at(day)


def _midnight(day: date) -> datetime:
    return datetime.combine(day, time.min).replace(tzinfo=timezone.get_default_timezone())
