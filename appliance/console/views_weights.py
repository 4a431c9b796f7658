"""Weights of members and groups, on the tuning page."""

from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.auth.models import Group
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from appliance.accounts.access import admin_required
from appliance.accounts.models import User
from appliance.console.models import ShareWeight
from appliance.console.weights import HIGHEST, LOWEST, subject_of, weight_clear, weight_set
from appliance.errors import NotFound


class WeightForm(forms.Form):
    who = forms.CharField(max_length=40)
    weight = forms.FloatField(min_value=LOWEST, max_value=HIGHEST)


def weights_shown() -> dict[str, Any]:
    """For the page: the weights, and who could get one. Blocking."""
    groups = [
        (f"group:{group.pk}", f"group {group.name}") for group in Group.objects.order_by("name")
    ]
    users = User.objects.filter(is_active=True).order_by("username")
    return {
        "rows": ShareWeight.objects.select_related("user", "group").order_by("pk"),
        "choices": groups + [(f"user:{user.pk}", user.username) for user in users],
        "low": LOWEST,
        "high": int(HIGHEST),
    }


@require_POST
@admin_required
def weights_set(request: HttpRequest) -> HttpResponse:
    form = WeightForm(request.POST)
    if not form.is_valid():
        text = f"A weight is a number from {LOWEST:g} to {HIGHEST:g}. Nothing was changed."
        messages.error(request, text)
        return redirect("console_tuning")
    try:
        subject = subject_of(form.cleaned_data["who"])
    except NotFound as exc:
        messages.error(request, exc.message)
        return redirect("console_tuning")
    row = weight_set(subject, form.cleaned_data["weight"], by=request.user)
    messages.success(request, f"{row.who} weighs {row.weight:g}. It holds within seconds.")
    return redirect("console_tuning")


@require_POST
@admin_required
def weights_clear(request: HttpRequest, row_id: int) -> HttpResponse:
    try:
        row = weight_clear(row_id, by=request.user)
        messages.success(request, f"{row.who} weighs 1 again. It holds within seconds.")
    except NotFound as exc:
        messages.error(request, exc.message)
    return redirect("console_tuning")
