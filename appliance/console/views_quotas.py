"""Limits: the rules, who is at theirs now, and what each member has left."""

from collections import Counter
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.auth.models import Group
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from appliance.accounts.access import admin_required
from appliance.accounts.models import User
from appliance.accounts.number_field import CountField
from appliance.accounts.selectors import members
from appliance.api_keys.models import ApiKey
from appliance.errors import ApplianceError, EngineUnavailable, NotFound
from appliance.quotas.limits import (
    LIMIT_KINDS,
    MAX_TOKENS,
    MAX_WAIT_S,
    month_resets_at,
    quota_day,
    quota_resets_at,
)
from appliance.quotas.models import LimitRule
from appliance.quotas.rules import limit_rule_delete, limit_rule_get, limit_rule_save
from appliance.quotas.selectors import MemberQuota, limit_rules, member_quotas
from appliance.serving.gateway import get_backend
from appliance.serving.turns import live_by_user, most_at_once, num_waiting

# More keys than this are not offered in the list: their rule is set on the page of keys.
MOST_KEYS = 500


class RuleForm(forms.Form):
    """`who` is `all`, `group:ID`, `user:ID` or `key:ID`."""

    who = forms.ChoiceField(label="For", widget=forms.Select(attrs={"class": "select"}))
    limit = forms.ChoiceField(
        label="Limit",
        choices=[(kind.name, kind.label) for kind in LIMIT_KINDS.values()],
        widget=forms.Select(attrs={"class": "select"}),
    )
    value = CountField(label="At most", low=0, high=MAX_TOKENS)
    wait_s = CountField(label="Wait, in seconds", low=0, high=MAX_WAIT_S, required=False)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["who"].choices = _subjects()
        self.fields["value"].help_text = "Write 5,000,000 or 5M."
        self.fields["wait_s"].help_text = "Empty or 0: refuse at once."

    def subject(self) -> dict[str, Any]:
        kind, _, number = self.cleaned_data["who"].partition(":")
        if kind == "all":
            return {}
        model = {"group": Group, "user": User, "key": ApiKey}[kind]
        found = model.objects.filter(pk=int(number)).first()
        if found is None:
            raise NotFound("This member, group or key is gone.")
        return {kind: found}


def _subjects() -> list[tuple[str, Any]]:
    groups = [(f"group:{group.pk}", group.name) for group in Group.objects.order_by("name")]
    users = [(f"user:{user.pk}", user.shown_name) for user in members()]
    live = ApiKey.objects.filter(revoked_at=None, source="api").select_related("owner")
    keys = [
        (f"key:{key.pk}", f"{key.name} ({key.prefix}) of {key.owner.username}")
        for key in live.order_by("owner__username", "name")[:MOST_KEYS]
    ]
    found: list[tuple[str, Any]] = [("all", "everybody")]
    for label, choices in (("Each member of group", groups), ("Member", users), ("Key", keys)):
        if choices:
            found.append((label, choices))
    return found


def _who_value(rule: LimitRule) -> str:
    for kind in ("group", "user", "key"):
        if (pk := getattr(rule, f"{kind}_id")) is not None:
            return f"{kind}:{pk}"
    return "all"


@never_cache
@require_http_methods(["GET", "POST"])
@admin_required
def quotas(request: HttpRequest) -> HttpResponse:
    """The page; a POST makes a rule, or changes the one there is for the same subject."""
    if request.method == "GET":
        return _page(request, RuleForm(initial=_chosen(request)))
    form = RuleForm(request.POST)
    if not form.is_valid():
        return _page(request, form)
    try:
        rule = limit_rule_save(
            form.cleaned_data["limit"],
            form.cleaned_data["value"],
            wait_s=form.cleaned_data["wait_s"] or 0,
            by=request.user,
            **form.subject(),
        )
    except ApplianceError as exc:
        form.add_error(exc.param if exc.param in form.fields else "value", exc.message)
        return _page(request, form)
    words = LIMIT_KINDS[rule.limit].words(rule.value)
    messages.success(request, f"Rule for {rule.who}: {words}. It holds at once.")
    return redirect("console_quotas")


@never_cache
@require_POST
@admin_required
def quota_rule_delete(request: HttpRequest, rule_id: int) -> HttpResponse:
    try:
        rule = limit_rule_get(rule_id)
    except ApplianceError as exc:
        messages.error(request, exc.message)
        return redirect("console_quotas")
    limit_rule_delete(rule, by=request.user)
    words = LIMIT_KINDS[rule.limit].words(rule.value)
    messages.success(request, f"Rule for {rule.who} deleted: {words}.")
    return redirect("console_quotas")


def _chosen(request: HttpRequest) -> dict[str, Any]:
    """What the form starts with: the rule of `?edit=ID`, or the subject of `?for=`."""
    number = request.GET.get("edit", "")
    if number.isascii() and number.isdigit() and len(number) < 19:
        rule = LimitRule.objects.filter(pk=int(number)).first()
        if rule is not None:
            return {
                "who": _who_value(rule),
                "limit": rule.limit,
                "value": f"{rule.value:,}",
                "wait_s": str(rule.wait_s or ""),
                "edited": rule,
            }
    return {"who": request.GET.get("for", "all"), "limit": "requests_per_minute"}


def _page(request: HttpRequest, form: RuleForm) -> HttpResponse:
    quotas = member_quotas(list(members()))
    today = quota_day()
    context = {
        "section": "quotas",
        "form": form,
        "edited": form.initial.get("edited"),
        "rules": [_row(rule) for rule in limit_rules()],
        "at_limit": _at_limit(quotas),
        "quotas": quotas,
        "used_today": sum(quota.used_today for quota in quotas),
        "resets_at": quota_resets_at(today),
        "month_resets_at": month_resets_at(today),
        "reset_in": _left(int((quota_resets_at(today) - timezone.now()).total_seconds())),
        "max_wait_s": MAX_WAIT_S,
    }
    return render(request, "console/quotas.html", context, status=400 if form.errors else 200)


def _row(rule: LimitRule) -> dict[str, Any]:
    kind = LIMIT_KINDS[rule.limit]
    over = f"waits up to {rule.wait_s} s, then refused" if rule.wait_s else "refused at once"
    return {"rule": rule, "words": kind.words(rule.value), "over": over}


def _at_limit(quotas: list[MemberQuota]) -> list[dict[str, Any]]:
    """Members whom a limit keeps from something now, with how many of theirs run and wait."""
    try:
        backend = get_backend()
        live = live_by_user(backend)
    except EngineUnavailable:
        backend, live = None, Counter()
    found = []
    for quota in quotas:
        words = [f"{each.limit.words}, until {_until(each.resets_at)}" for each in quota.spent]
        running = live[str(quota.user.pk)]
        for limit in quota.limits if backend and running else ():
            most = most_at_once(limit, backend)
            if most is not None and running >= most:
                words.append(f"{limit.words}: {running:,} run or wait")
        in_line = num_waiting(f"user:{quota.user.pk}")
        if words or in_line:
            found.append({"user": quota.user, "words": words, "num_waiting": in_line})
    return found


def _until(at: Any) -> str:
    return f"{timezone.localtime(at, timezone.get_default_timezone()):%d %b %H:%M}"


def _left(seconds: int) -> str:
    seconds = max(0, seconds)
    return f"{seconds // 3600} h {seconds // 60 % 60} min"
