"""The bars of the last 14 days as plain numbers, so that the template only places them."""

from collections import defaultdict
from dataclasses import dataclass
from datetime import date, timedelta

from django.db.models import F, Sum

from appliance.accounts.models import User
from appliance.quotas.models import UsageRecord

NUM_DAYS = 14
# The drawing: a baseline at y 90, the axis ends at y 12, a bar every 61 units.
BASE_Y, TOP_Y, FIRST_X, STEP_X, BAR_WIDTH = 90, 12, 48, 61, 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    label: str
    chat_tokens: int
    api_tokens: int
    x: int
    middle_x: int
    chat_y: float
    chat_height: float
    api_y: float
    api_height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    bars: list[Bar]
    top_label: str
    half_label: str
    # Where the quota's line lies; None without one or when it lies far above every bar.
    limit_y: float | None
    summary: str


def usage_chart(user: User, today: date, limit_tokens: int | None) -> Chart | None:
    """None when nothing was used in these days."""
    days = [today - timedelta(days=back) for back in reversed(range(NUM_DAYS))]
    chat: dict[date, int] = defaultdict(int)
    api: dict[date, int] = defaultdict(int)
    rows = (
        UsageRecord.objects.filter(user=user, day__gte=days[0])
        .values("day", "source")
        .annotate(tokens=Sum(F("prompt_tokens") + F("completion_tokens")))
    )
    for row in rows:
        (chat if row["source"] == "chat" else api)[row["day"]] += row["tokens"]
    most = max(chat[day] + api[day] for day in days)
    if not most:
        return None
    # A quota far above the use would press the bars flat: then its line is left out.
    show_limit = limit_tokens is not None and limit_tokens <= 4 * most
    top = max(most, limit_tokens) if show_limit and limit_tokens else most
    top = round_top(top)
    per_token = (BASE_Y - TOP_Y) / top
    best = max(days, key=lambda day: chat[day] + api[day])
    return Chart(
        bars=[
            _bar(number, day, today, chat[day], api[day], per_token)
            for number, day in enumerate(days)
        ],
        top_label=short_count(top),
        half_label=short_count(top / 2),
        limit_y=BASE_Y - limit_tokens * per_token if show_limit and limit_tokens else None,
        summary=(
            f"Tokens a day for the last {NUM_DAYS} days, split into chat and API keys. "
            f"Highest: {most:,} on {best.day} {best:%B}."
        ),
    )


def _bar(number: int, day: date, today: date, chat: int, api: int, per_token: float) -> Bar:
    x = FIRST_X + number * STEP_X
    chat_height, api_height = chat * per_token, api * per_token
    with_month = number == 0 or day.day == 1
    return Bar(
        label="today" if day == today else f"{day.day} {day:%b}" if with_month else str(day.day),
        chat_tokens=chat,
        api_tokens=api,
        x=x,
        middle_x=x + BAR_WIDTH // 2,
        chat_y=round(BASE_Y - chat_height, 1),
        chat_height=round(chat_height, 1),
        api_y=round(BASE_Y - chat_height - api_height, 1),
        api_height=round(api_height, 1),
    )


def round_top(tokens: int) -> int:
    """The least number from `tokens` on that reads well on an axis, as does its half."""
    if tokens <= 10:
        return tokens + tokens % 2
    size = 10 ** (len(str(tokens)) - 1)
    steps = (1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10)
    return next(round(step * size) for step in steps if tokens <= round(step * size))


def short_count(tokens: float) -> str:
    """`850`, `12k`, `1.5M`."""
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if tokens >= size:
            return f"{tokens / size:.1f}".removesuffix(".0") + unit
    return f"{tokens:.0f}"
