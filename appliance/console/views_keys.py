"""All API keys of all members, and the rules for new ones."""

import math
from datetime import timedelta
from urllib.parse import urlencode

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from appliance.account_page.key_page import key_page
from appliance.accounts.access import admin_required
from appliance.accounts.number_field import CountField
from appliance.api_keys.models import ApiKey
from appliance.api_keys.services import (
    MAX_KEYS_RULE,
    MAX_LIFE_DAYS,
    api_key_revoke,
    key_rules,
    key_rules_set,
)
from appliance.quotas.usage import tokens_of_keys

KEYS_A_PAGE = 50
SOON = timedelta(days=14)
STATES = {"live": "live", "ended": "revoked or ended", "all": "all"}


class KeyRulesForm(forms.Form):
    max_live_keys = CountField(label="Live keys a member at most", low=0, high=MAX_KEYS_RULE)
    max_life_days = CountField(
        label="Longest life in days", low=1, high=MAX_LIFE_DAYS, required=False
    )

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.fields["max_live_keys"].help_text = f"0 to {MAX_KEYS_RULE:,}. 0: nobody makes keys."
        self.fields["max_life_days"].help_text = "Empty: a key needs no end."


@never_cache
@require_GET
@admin_required
def keys(request: HttpRequest) -> HttpResponse:
    return _page(request)


@never_cache
@require_POST
@admin_required
def keys_rules(request: HttpRequest) -> HttpResponse:
    form = KeyRulesForm(request.POST)
    if not form.is_valid():
        return _page(request, form)
    key_rules_set(request.user, **form.cleaned_data)
    messages.success(request, "Saved. The rules hold for keys that are made from now on.")
    return redirect("console_keys")


@never_cache
@require_http_methods(["GET", "POST"])
@admin_required
def key(request: HttpRequest, key_id: int) -> HttpResponse:
    """One key of anybody. Another secret only for service accounts: see `key_page`."""
    found = get_object_or_404(ApiKey.objects.select_related("owner"), pk=key_id)
    is_rotation = request.method == "POST" and request.POST.get("act") == "rotate"
    if is_rotation and not found.owner.is_service:
        raise PermissionDenied
    return key_page(request, found, by=request.user)


@never_cache
@require_POST
@admin_required
def key_revoke(request: HttpRequest, key_id: int) -> HttpResponse:
    key = get_object_or_404(ApiKey.objects.select_related("owner"), pk=key_id)
    api_key_revoke(key, by=request.user)
    messages.success(
        request,
        f"Key “{key.name}” of {key.owner.username} revoked. Scripts that use it get “401” from "
        "now on.",
    )
    return redirect("console_keys")


def _page(request: HttpRequest, form: KeyRulesForm | None = None) -> HttpResponse:
    words = request.GET.get("q", "").strip()[:80]
    state = request.GET.get("state", "live")
    state = state if state in STATES else "live"
    page = Paginator(_found(words, state), KEYS_A_PAGE).get_page(request.GET.get("page"))
    tokens = tokens_of_keys([key.pk for key in page])
    now = timezone.now()
    for key in page:
        key.tokens_week = tokens.get(key.pk, 0)
        left = key.expires_at - now if key.expires_at else None
        key.days_left = math.ceil(left / timedelta(days=1)) if left else None
        key.ends_soon = left is not None and left <= SOON
    rules = key_rules()
    initial = {"max_live_keys": rules.max_live_keys, "max_life_days": rules.max_life_days}
    context = {
        "section": "keys",
        "page": page,
        "words": words,
        "state": state,
        "query": urlencode({"q": words, "state": state}) + "&",
        "states": STATES,
        "form": form or KeyRulesForm(initial=initial),
    }
    return render(request, "console/keys.html", context, status=400 if form else 200)


def _found(words: str, state: str) -> QuerySet[ApiKey]:
    found = ApiKey.objects.select_related("owner")
    for word in words.split():
        found = found.filter(
            Q(name__icontains=word) | Q(prefix__icontains=word) | Q(owner__username__icontains=word)
        )
    live = Q(revoked_at=None) & (Q(expires_at=None) | Q(expires_at__gt=timezone.now()))
    if state == "live":
        return found.filter(live)
    return found.exclude(live) if state == "ended" else found
