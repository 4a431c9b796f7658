"""Service accounts, for scripts that belong to nobody: keys and limits, and no sign-in."""

from typing import Any

from django import forms
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db.models import Count, Max, Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from appliance.accounts.access import admin_required
from appliance.accounts.models import User
from appliance.accounts.selectors import members
from appliance.accounts.services import user_create
from appliance.api_keys.forms import KeyForm
from appliance.api_keys.services import api_key_issue
from appliance.errors import ApplianceError


class ServiceForm(forms.Form):
    username = forms.CharField(
        label="Name of a new service account",
        max_length=150,
        validators=[User.username_validator],
        widget=forms.TextInput(attrs={"class": "input", "autocomplete": "off"}),
    )


@never_cache
@require_http_methods(["GET", "POST"])
@admin_required
def services(request: HttpRequest) -> HttpResponse:
    form = ServiceForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            made = user_create(form.cleaned_data["username"], is_service=True, by=request.user)
        except ApplianceError as exc:
            form.add_error("username", exc.message)
        except ValidationError as exc:
            form.add_error("username", exc.messages[0])
        else:
            messages.success(request, f"Service account {made.username} made. Now make a key.")
            return redirect("console_service", made.pk)
    live = Q(api_keys__revoked_at=None) & (
        Q(api_keys__expires_at=None) | Q(api_keys__expires_at__gt=timezone.now())
    )
    accounts = members().filter(is_service=True)
    context = {
        "section": "users",
        "form": form,
        "accounts": accounts.annotate(
            num_keys=Count("api_keys", filter=live), used_at=Max("api_keys__last_used_at")
        ),
    }
    status = 400 if form.errors else 200
    return render(request, "console/services.html", context, status=status)


@never_cache
@require_http_methods(["GET", "POST"])
@admin_required
def service(request: HttpRequest, user_id: int) -> HttpResponse:
    """One account with its keys; a POST makes a key, whose secret is in this one answer."""
    account = get_object_or_404(User, pk=user_id, is_service=True)
    form = KeyForm(request.POST or None, owner=account)
    made: dict[str, Any] = {}
    if request.method == "POST" and form.is_valid():
        fields = form.cleaned_data
        try:
            key, secret = api_key_issue(
                account, fields["name"], fields["scopes"], fields["expires"], by=request.user
            )
        except ApplianceError as exc:
            form.add_error(exc.param if exc.param in form.fields else "name", exc.message)
        else:
            made = {"new_key": key, "secret": secret}
            form = KeyForm(owner=account)
    context = {
        "section": "users",
        "account": account,
        "form": form,
        "keys": sorted(account.api_keys.all(), key=lambda key: not key.is_live),
        **made,
    }
    status = 400 if form.errors else 200
    return render(request, "console/service.html", context, status=status)
