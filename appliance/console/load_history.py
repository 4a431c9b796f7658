"""The plotted numbers of longer times: seconds become minutes, minutes become hours, old ones go.

The serving process writes a row for each minute that ended; the background worker makes the hours
and takes away what is too old. Every step may be repeated: a row is known by its span and time.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, NamedTuple

from django.db.models import Max
from django.utils import timezone

from appliance.console.models import LoadRow
from appliance.console.samples import COLUMNS, Sample, Samples, merged

MINUTE_S, HOUR_S = 60, 3600
KEEP_MINUTES = timedelta(hours=50)
KEEP_HOURS = timedelta(days=35)


class Range(NamedTuple):
    """A choice of the page: how far back, and how many seconds one drawn point stands for."""

    seconds: int
    point_s: int
    # Of the rows it is drawn from.
    span_s: int


RANGES = {
    "1h": Range(3600, 10, MINUTE_S),
    "24h": Range(86_400, 300, MINUTE_S),
    "7d": Range(7 * 86_400, HOUR_S, HOUR_S),
}


class MinuteMaker:
    """Collects samples and gives a row when the minute of the wall clock is over."""

    def __init__(self, epoch: float) -> None:
        self._epoch = epoch
        self._minute: int | None = None
        self._samples: list[Sample] = []

    def take(self, sample: Sample) -> tuple[datetime, Sample] | None:
        minute = int((self._epoch + (sample[0] or 0.0)) // MINUTE_S)
        ended = None
        if self._minute is not None and minute != self._minute and self._samples:
            at = self._minute * MINUTE_S
            ended = datetime.fromtimestamp(at, UTC), merged(self._samples, at)
            self._samples = []
        self._minute = minute
        self._samples.append(sample)
        return ended


def minute_save(at: datetime, row: Sample) -> None:
    """Blocking."""
    _save(MINUTE_S, at, row)


def hours_make(now: datetime | None = None) -> int:
    """Roll ended hours up from their minutes; returns how many. Blocking, may run at any time."""
    now = now or timezone.now()
    this_hour = now.replace(minute=0, second=0, microsecond=0)
    minutes = LoadRow.objects.filter(span_s=MINUTE_S, at__lt=this_hour)
    newest = LoadRow.objects.filter(span_s=HOUR_S).aggregate(newest=Max("at"))["newest"]
    if newest is not None:
        # The newest hour once more: its last minute may have been written after it.
        minutes = minutes.filter(at__gte=newest)
    number = 0
    for hour, rows in groupby(minutes.order_by("at"), key=lambda row: _hour_of(row.at)):
        _save(HOUR_S, hour, merged([_sample(row) for row in rows], hour.timestamp()))
        number += 1
    return number


def old_rows_delete(now: datetime | None = None) -> int:
    """Blocking."""
    now = now or timezone.now()
    number = 0
    for span_s, keep in ((MINUTE_S, KEEP_MINUTES), (HOUR_S, KEEP_HOURS)):
        deleted, _ = LoadRow.objects.filter(span_s=span_s, at__lt=now - keep).delete()
        number += deleted
    return number


def stored_rows(name: str, now: datetime) -> list[Sample]:
    """Rows of the range as far as they are stored; times are unix seconds. Blocking."""
    wanted = RANGES[name]
    begin = now - timedelta(seconds=wanted.seconds)
    rows = LoadRow.objects.filter(at__gte=begin, span_s=wanted.span_s).order_by("at")
    found = [_sample(row) for row in rows]
    if wanted.span_s == HOUR_S:
        # The hours that are not rolled up yet.
        after = begin if not found else datetime.fromtimestamp((found[-1][0] or 0) + HOUR_S, UTC)
        minutes = LoadRow.objects.filter(at__gte=after, span_s=MINUTE_S).order_by("at")
        found += [_sample(row) for row in minutes]
    return found


def points(name: str, stored: Sequence[Sample], live: Samples, epoch: float) -> list[Sample]:
    """The range as points of equal spans: what this process saw goes before what is stored."""
    wanted = RANGES[name]
    seen = [[round(epoch + (s[0] or 0.0), 2), *s[1:]] for s in live.since(-1.0)]
    begin = seen[0][0] if seen else float("inf")
    rows = [row for row in stored if (row[0] or 0.0) + MINUTE_S <= (begin or 0.0)] + seen
    if wanted.span_s == HOUR_S or wanted.point_s > MINUTE_S:
        # An hour of seconds would count as much as all of the day beside it: minutes first.
        rows = _grouped(rows, MINUTE_S)
    return _grouped(rows, wanted.point_s)


def _grouped(rows: Sequence[Sample], span_s: int) -> list[Sample]:
    return [
        merged(list(group), number * span_s)
        for number, group in groupby(rows, key=lambda row: int((row[0] or 0.0) // span_s))
    ]


def _hour_of(at: datetime) -> datetime:
    return at.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def _save(span_s: int, at: datetime, row: Sample) -> None:
    values = dict(zip(COLUMNS[1:], row[1:], strict=True))
    LoadRow.objects.update_or_create(span_s=span_s, at=at, defaults={"values": values})


def _sample(row: LoadRow) -> Sample:
    # A column of a later version is unknown here, and one that is new has no past.
    values: dict[str, Any] = row.values
    return [row.at.timestamp(), *(values.get(name) for name in COLUMNS[1:])]
