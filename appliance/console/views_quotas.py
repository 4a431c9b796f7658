"""How many tokens a day the team and each member may use, and what is left today."""

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from appliance.accounts.access import admin_required
from appliance.accounts.models import User
from appliance.accounts.selectors import members
from appliance.console.number_field import CountField
from appliance.quotas.selectors import quota_rules, quota_statuses
from appliance.quotas.services import (
    MAX_TOKENS_PER_DAY,
    quota_day,
    quota_default_limit,
    quota_resets_at,
    quota_rule_clear,
    quota_rule_set,
)


class QuotaForm(forms.Form):
    """`act` says which button was pressed: a number, no limit, or the rule for everybody."""

    act = forms.ChoiceField(choices=[("set", ""), ("none", ""), ("clear", "")])
    tokens = CountField(label="Tokens a day", low=0, high=MAX_TOKENS_PER_DAY, required=False)

    def clean(self) -> None:
        no_number = "tokens" not in self.errors and self.cleaned_data.get("tokens") is None
        if self.cleaned_data.get("act") == "set" and no_number:
            self.add_error("tokens", "Write a number, or press “No limit”.")


@never_cache
@require_GET
@admin_required
def quotas(request: HttpRequest) -> HttpResponse:
    return _page(request)


@never_cache
@require_POST
@admin_required
def quota_everybody(request: HttpRequest) -> HttpResponse:
    return _set(request, None)


@never_cache
@require_POST
@admin_required
def quota_member(request: HttpRequest, user_id: int) -> HttpResponse:
    return _set(request, get_object_or_404(User, pk=user_id))


def _set(request: HttpRequest, user: User | None) -> HttpResponse:
    form = QuotaForm(request.POST)
    act = request.POST.get("act")
    if act != "set":
        # Only the button counts then, whatever was typed.
        form = QuotaForm({"act": act})
    if not form.is_valid():
        return _page(request, form=form, whose=user.pk if user else 0)
    whose = user.username if user else "everybody"
    if act == "clear" and user is not None:
        quota_rule_clear(user, by=request.user)
        messages.success(request, f"The rule for everybody holds for {whose} again.")
        return redirect("console_quotas")
    tokens = form.cleaned_data["tokens"] if act == "set" else None
    quota_rule_set(user, tokens, by=request.user)
    words = "no limit" if tokens is None else f"{tokens:,} tokens a day"
    messages.success(request, f"Quota of {whose}: {words}. It holds at once, also for today.")
    return redirect("console_quotas")


def _page(request: HttpRequest, *, form: QuotaForm | None = None, whose: int = -1) -> HttpResponse:
    """`whose` is the member of a refused `form`, 0 for everybody."""
    people = list(members())
    default = quota_default_limit()
    statuses, rules = quota_statuses(people), quota_rules(people)
    error = "; ".join(form.errors.get("tokens", ["Press one of the buttons."])) if form else ""
    resets_at = quota_resets_at(quota_day())
    seconds_left = max(0, int((resets_at - timezone.now()).total_seconds()))
    rows = [
        {
            "user": user,
            "status": statuses[user.pk],
            "has_rule": user.pk in rules,
            "rule": rules.get(user.pk),
            "can_lift": user.pk not in rules or rules[user.pk] is not None,
            "high": (statuses[user.pk].limit_tokens or 0) * 9 // 10,
            "error": error if user.pk == whose else "",
        }
        for user in people
    ]
    context = {
        "section": "quotas",
        "default": default,
        "can_lift": default is not None,
        "default_error": error if whose == 0 else "",
        "typed": request.POST.get("tokens", "") if form else "",
        "rows": rows,
        "used_today": sum(status.used_tokens for status in statuses.values()),
        "resets_at": resets_at,
        "reset_in": f"{seconds_left // 3600} h {seconds_left // 60 % 60} min",
    }
    return render(request, "console/quotas.html", context, status=400 if form else 200)
