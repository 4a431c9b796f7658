"""Tokens by day and member, from the ledger, in the team's time zone."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET

from appliance.account_page.usage_chart import short_count
from appliance.account_page.views import csv_answer
from appliance.accounts.access import admin_required
from appliance.accounts.selectors import service_names
from appliance.console.usage_drawing import hours_drawing, usage_drawing
from appliance.quotas.limits import quota_day
from appliance.quotas.usage import UsagePart, usage_hours, usage_parts

NUM_DAYS = 30
NUM_HOURS = 24
# Twelve times thirty days, so that the bars are of one width.
YEAR = 360
RANGES = {1: "24 hours", 30: "30 days", 90: "90 days", YEAR: "360 days"}


@dataclass(slots=True)
class Total:
    key: Any
    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def add(self, part: UsagePart) -> None:
        self.num_requests += part.num_requests
        self.prompt_tokens += part.prompt_tokens
        self.cached_tokens += part.cached_tokens
        self.completion_tokens += part.completion_tokens


@never_cache
@require_GET
@admin_required
def usage(request: HttpRequest) -> HttpResponse:
    """Of everybody, or of the one `member` of the query, over the days of `days`."""
    num_days = _days(request)
    everybody = usage_hours(hours=NUM_HOURS) if num_days == 1 else usage_parts(days=num_days)
    member = request.GET.get("member", "")
    parts = [part for part in everybody if not member or part.username == member]
    if num_days == 1:
        drawing = hours_drawing(parts, timezone.now(), NUM_HOURS)
    else:
        drawing = usage_drawing(parts, quota_day(), num_days)
    by_member = sorted(_totals(everybody, lambda p: p.username), key=lambda t: -t.tokens)
    context = {
        "section": "usage",
        "num_days": num_days,
        "ranges": RANGES,
        "range_words": RANGES[num_days],
        "member": member,
        "service_names": service_names(),
        "names": sorted(total.key for total in by_member),
        "chart": drawing,
        "top_label": short_count(drawing.top_tokens) if drawing else "",
        "half_label": short_count(drawing.top_tokens / 2) if drawing else "",
        "by_member": by_member,
        "most": max((total.tokens for total in by_member), default=1) or 1,
        "step": {1: "hour", YEAR: "month"}.get(num_days, "day"),
        "by_step": _totals(parts, _step_of(num_days)),
        "total": next(iter(_totals(parts, lambda _: None)), Total(None)),
        "time_zone": settings.TIME_ZONE,
        "query": urlencode({"days": num_days}),
    }
    return render(request, "console/usage.html", context)


def _days(request: HttpRequest) -> int:
    """The range of the query; the usual one for what is no range."""
    found = {str(days): days for days in RANGES}
    return found.get(request.GET.get("days", ""), NUM_DAYS)


def _step_of(num_days: int) -> Callable[[UsagePart], Any]:
    if num_days == 1:
        return lambda part: part.hour
    if num_days == YEAR:
        return lambda part: part.day.replace(day=1)
    return lambda part: part.day


@never_cache
@require_GET
@admin_required
def usage_download(request: HttpRequest) -> HttpResponse:
    days = max(_days(request), NUM_DAYS)
    return csv_answer(usage_parts(days=days), f"usage-{quota_day()}.csv")


def _totals(parts: Iterable[UsagePart], key: Callable[[UsagePart], Any]) -> list[Total]:
    """One total for each key, in the order of the parts."""
    totals: dict[Any, Total] = {}
    for part in parts:
        totals.setdefault(key(part), Total(key(part))).add(part)
    return list(totals.values())
