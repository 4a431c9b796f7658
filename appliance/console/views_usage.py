"""Tokens by day and member, from the ledger, in the team's time zone."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET

from appliance.account_page.usage_chart import short_count
from appliance.account_page.views import csv_answer
from appliance.accounts.access import admin_required
from appliance.accounts.selectors import service_names
from appliance.console.usage_drawing import usage_drawing
from appliance.quotas.limits import quota_day
from appliance.quotas.selectors import UsagePart, usage_parts

NUM_DAYS = 30


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
    """Of everybody, or of the one `member` of the query."""
    everybody = usage_parts(days=NUM_DAYS)
    member = request.GET.get("member", "")
    parts = [part for part in everybody if not member or part.username == member]
    today = quota_day()
    drawing = usage_drawing(parts, today, NUM_DAYS)
    by_member = sorted(_totals(everybody, lambda p: p.username), key=lambda t: -t.tokens)
    context = {
        "section": "usage",
        "num_days": NUM_DAYS,
        "member": member,
        "service_names": service_names(),
        "names": sorted(total.key for total in by_member),
        "chart": drawing,
        "top_label": short_count(drawing.top_tokens) if drawing else "",
        "half_label": short_count(drawing.top_tokens / 2) if drawing else "",
        "by_member": by_member,
        "most": max((total.tokens for total in by_member), default=1) or 1,
        "by_day": _totals(parts, lambda p: p.day),
        "total": next(iter(_totals(parts, lambda _: None)), Total(None)),
        "time_zone": settings.TIME_ZONE,
    }
    return render(request, "console/usage.html", context)


@never_cache
@require_GET
@admin_required
def usage_download(request: HttpRequest) -> HttpResponse:
    return csv_answer(usage_parts(days=NUM_DAYS), f"usage-{quota_day()}.csv")


def _totals(parts: Iterable[UsagePart], key: Callable[[UsagePart], Any]) -> list[Total]:
    """One total for each key, in the order of the parts."""
    totals: dict[Any, Total] = {}
    for part in parts:
        totals.setdefault(key(part), Total(key(part))).add(part)
    return list(totals.values())
