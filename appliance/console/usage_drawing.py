"""The bars of the usage page as plain numbers, so that the template only places them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta

from django.utils import timezone

from appliance.account_page.usage_chart import round_top
from appliance.quotas.usage import UsagePart

# The drawing: a baseline at y 90, the axis ends at y 12, a bar every 28.5 units.
BASE_Y, TOP_Y, FIRST_X, STEP_X, BAR_WIDTH = 90, 12, 42, 28.5, 20
NUM_BARS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    title: str
    # Empty where a label would touch the next one.
    label: str
    x: float
    middle_x: float
    chat_y: float
    chat_height: float
    other_y: float
    other_height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    bars: list[Bar]
    # At the top of the axis.
    top_tokens: int
    summary: str


@dataclass(slots=True)
class _Span:
    """An hour, a day, or several days together."""

    words: str
    label: str
    chat: int = 0
    other: int = 0

    def add(self, part: UsagePart) -> None:
        if part.source == "chat":
            self.chat += part.tokens
        else:
            self.other += part.tokens


def usage_drawing(parts: Iterable[UsagePart], today: date, num_days: int) -> Drawing | None:
    """At most 30 bars of a day or of several; None when nothing was used in these days."""
    days_a_bar = max(1, num_days // NUM_BARS)
    first = today - timedelta(days=num_days - 1)
    spans = []
    for number in range(num_days // days_a_bar):
        begin = first + timedelta(days=number * days_a_bar)
        end = begin + timedelta(days=days_a_bar - 1)
        words = _day(begin) if days_a_bar == 1 else f"{_day(begin)} to {_day(end)}"
        spans.append(_Span(words, "today" if end == today else _day(begin)))
    for part in parts:
        number = (part.day - first).days // days_a_bar
        if 0 <= number < len(spans):
            spans[number].add(part)
    each = "a day" if days_a_bar == 1 else f"in {days_a_bar} days"
    return _drawing(spans, f"Tokens {each} for the last {num_days} days")


def hours_drawing(parts: Iterable[UsagePart], now: datetime, num_hours: int) -> Drawing | None:
    """A bar an hour; None when nothing was used."""
    last = now.replace(minute=0, second=0, microsecond=0)
    begins = [last - timedelta(hours=back) for back in reversed(range(num_hours))]
    spans = {}
    for begin in begins:
        local = timezone.localtime(begin, timezone.get_default_timezone())
        spans[begin] = _Span(f"{_day(local)} {local:%H:%M}", f"{local:%H:%M}")
    for part in parts:
        if part.hour in spans:
            spans[part.hour].add(part)
    return _drawing(list(spans.values()), f"Tokens an hour for the last {num_hours} hours")


def _day(day: date) -> str:
    return f"{day.day} {day:%b}"


def _drawing(spans: Sequence[_Span], what: str) -> Drawing | None:
    best = max(spans, key=lambda span: span.chat + span.other)
    most = best.chat + best.other
    if not most:
        return None
    top = round_top(most)
    per_token = (BASE_Y - TOP_Y) / top
    return Drawing(
        bars=[_bar(number, span, len(spans), per_token) for number, span in enumerate(spans)],
        top_tokens=top,
        summary=f"{what}, split into chat and all else. Highest: {most:,}, {best.words}.",
    )


def _bar(number: int, span: _Span, num_spans: int, per_token: float) -> Bar:
    x = FIRST_X + number * STEP_X
    chat_height, other_height = span.chat * per_token, span.other * per_token
    return Bar(
        title=f"{span.words}: {span.chat + span.other:,} tokens",
        label=span.label if (num_spans - 1 - number) % 4 == 0 else "",
        x=x,
        middle_x=x + BAR_WIDTH / 2,
        chat_y=round(BASE_Y - chat_height, 1),
        chat_height=round(chat_height, 1),
        other_y=round(BASE_Y - chat_height - other_height, 1),
        other_height=round(other_height, 1),
    )
