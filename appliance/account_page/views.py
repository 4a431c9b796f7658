"""The account page: reads from selectors of the apps below, changes through their services."""

import math
from collections.abc import Iterable
from datetime import timedelta

from django.contrib import messages
from django.db.models import F, Sum
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from appliance.account_page.usage_chart import usage_chart
from appliance.accounts.models import User
from appliance.accounts.selectors import admin_names
from appliance.api_keys.forms import KeyForm
from appliance.api_keys.models import ApiKey
from appliance.api_keys.services import api_key_issue, api_key_of, api_key_revoke
from appliance.errors import ApplianceError
from appliance.quotas.limits import quota_day
from appliance.quotas.models import UsageRecord
from appliance.quotas.selectors import (
    allowances,
    caps_of,
    quota_status,
)
from appliance.quotas.usage import UsagePart, usage_parts
from appliance.quotas.usage_csv import usage_csv

# A key that ends within this many days is marked.
SOON_DAYS = 14
CSV_DAYS = 30


@never_cache
@require_GET
def account(request: HttpRequest) -> HttpResponse:
    return _page(request, KeyForm(owner=_user(request)))


@never_cache
@require_GET
def usage_download(request: HttpRequest) -> HttpResponse:
    """The own usage of the last 30 days."""
    return csv_answer(usage_parts(_user(request), days=CSV_DAYS), f"my-usage-{quota_day()}.csv")


def csv_answer(parts: Iterable[UsagePart], name: str) -> HttpResponse:
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return HttpResponse(usage_csv(parts), "text/csv; charset=utf-8", headers=headers)


@never_cache
@require_POST
def key_create(request: HttpRequest) -> HttpResponse:
    """Answers with the page itself: the secret is in this one answer and nowhere else."""
    form = KeyForm(request.POST, owner=_user(request))
    if form.is_valid():
        try:
            key, secret = api_key_issue(
                _user(request),
                form.cleaned_data["name"],
                form.cleaned_data["scopes"],
                form.cleaned_data["expires"],
            )
        except ApplianceError as exc:
            form.add_error(exc.param if exc.param in form.fields else "name", exc.message)
        else:
            return _page(request, KeyForm(owner=_user(request)), new_key=key, secret=secret)
    return _page(request, form)


@never_cache
@require_POST
def key_revoke(request: HttpRequest, key_id: int) -> HttpResponse:
    try:
        key = api_key_of(_user(request), key_id)
    except ApplianceError as exc:
        messages.error(request, exc.message)
    else:
        api_key_revoke(key)
        messages.success(
            request, f"Key “{key.name}” revoked. Scripts that use it get “401” from now on."
        )
    return redirect("account")


def _user(request: HttpRequest) -> User:
    assert isinstance(request.user, User), "the log-in layer let a visitor through"
    return request.user


def _page(
    request: HttpRequest,
    form: KeyForm,
    *,
    new_key: ApiKey | None = None,
    secret: str = "",
) -> HttpResponse:
    user = _user(request)
    quota = quota_status(user)
    now = timezone.now()
    # Read before the reset, so never negative.
    seconds_left = max(0, int((quota.resets_at - now).total_seconds()))
    day_limit = quota.limit_tokens if quota.window == "day" else None
    context = {
        "quota": quota,
        "quota_high": (quota.limit_tokens or 0) * 9 // 10,
        "reset_in": f"{seconds_left // 3600} h {seconds_left // 60 % 60} min",
        "allowances": allowances(user.pk),
        "caps": caps_of(user.pk),
        "chart": usage_chart(user, quota_day(), day_limit),
        "keys": _keys(user),
        "form": form,
        "new_key": new_key,
        "secret": secret,
        "api_url": request.build_absolute_uri("/v1"),
        "root_url": request.build_absolute_uri("/").rstrip("/"),
        "admin_names": admin_names(),
    }
    status = 400 if form.errors else 200
    return render(request, "accounts/account.html", context, status=status)


def _keys(user: User) -> list[ApiKey]:
    """Live keys first; each with `tokens_today` and `days_left` for the table."""
    today = quota_day()
    used = dict(
        UsageRecord.objects.filter(user=user, day=today, key_id__isnull=False)
        .values("key_id")
        .annotate(tokens=Sum(F("prompt_tokens") + F("completion_tokens")))
        .values_list("key_id", "tokens")
    )
    # Keys of tests come and go by themselves: one that is over says nothing to its owner.
    keys = [key for key in user.api_keys.all() if key.is_live or key.source == "api"]
    for key in keys:
        key.tokens_today = used.get(key.pk, 0)
        left = key.expires_at - timezone.now() if key.expires_at else None
        key.days_left = math.ceil(left / timedelta(days=1)) if left else None
        key.ends_soon = key.days_left is not None and key.days_left <= SOON_DAYS
    return sorted(keys, key=lambda key: not key.is_live)
