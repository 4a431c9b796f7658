"""The bars of the usage page as plain numbers, so that the template only places them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, timedelta

from appliance.quotas.selectors import UsagePart

# The drawing: a baseline at y 90, the highest value at y 12, a bar every 28.5 units.
BASE_Y, TOP_Y, FIRST_X, STEP_X, BAR_WIDTH = 90, 12, 42, 28.5, 20


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
    top_tokens: int
    summary: str


def usage_drawing(parts: Iterable[UsagePart], today: date, num_days: int) -> Drawing | None:
    """None when nothing was used in these days."""
    chat: Counter[date] = Counter()
    other: Counter[date] = Counter()
    for part in parts:
        (chat if part.source == "chat" else other)[part.day] += part.tokens
    days = [today - timedelta(days=back) for back in reversed(range(num_days))]
    best = max(days, key=lambda day: chat[day] + other[day])
    top = chat[best] + other[best]
    if not top:
        return None
    per_token = (BASE_Y - TOP_Y) / top
    return Drawing(
        bars=[_bar(n, day, today, chat[day], other[day], per_token) for n, day in enumerate(days)],
        top_tokens=top,
        summary=(
            f"Tokens a day for the last {num_days} days, split into chat and all else. "
            f"Highest: {top:,} on {best.day} {best:%B}."
        ),
    )


def _bar(number: int, day: date, today: date, chat: int, other: int, per_token: float) -> Bar:
    x = FIRST_X + number * STEP_X
    chat_height, other_height = chat * per_token, other * per_token
    is_labelled = (today - day).days % 4 == 0
    return Bar(
        title=f"{day.day} {day:%b}: {chat + other:,} tokens",
        label="" if not is_labelled else "today" if day == today else f"{day.day} {day:%b}",
        x=x,
        middle_x=x + BAR_WIDTH / 2,
        chat_y=round(BASE_Y - chat_height, 1),
        chat_height=round(chat_height, 1),
        other_y=round(BASE_Y - chat_height - other_height, 1),
        other_height=round(other_height, 1),
    )
