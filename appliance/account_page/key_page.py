"""The page of one key: where and how much it may be used, and another secret for it.

Owners see theirs under /account/; admins see everybody's in the console, with the same page.
"""

from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from appliance.accounts.models import User
from appliance.api_keys.forms import KeyLimitsForm, RotateForm
from appliance.api_keys.models import ApiKey
from appliance.api_keys.services import api_key_of, api_key_restrict, api_key_rotate
from appliance.errors import ApplianceError
from appliance.quotas.rules import (
    KEY_LIMITS,
    limit_rules_of_key,
    own_key_limits,
    own_key_limits_set,
)


@never_cache
@require_http_methods(["GET", "POST"])
def own_key(request: HttpRequest, key_id: int) -> HttpResponse:
    assert isinstance(request.user, User), "the log-in layer let a visitor through"
    try:
        key = api_key_of(request.user, key_id)
    except ApplianceError as exc:
        messages.error(request, exc.message)
        return redirect("account")
    return key_page(request, key, by=None)


def key_page(request: HttpRequest, key: ApiKey, *, by: User | None) -> HttpResponse:
    """Show `key`, or do what was posted. `by` is the admin who does it for somebody else."""
    limits, rotate, secret = _limits_form(key, by), RotateForm(), ""
    if request.method == "POST" and request.POST.get("act") == "rotate":
        rotate = RotateForm(request.POST)
        if rotate.is_valid():
            try:
                secret = api_key_rotate(key, rotate.cleaned_data["overlap"], by=by)
            except ApplianceError as exc:
                rotate.add_error("overlap", exc.message)
    elif request.method == "POST":
        limits = _limits_form(key, by, request.POST)
        if limits.is_valid() and _save(limits, key, by):
            messages.success(request, "Saved. It holds from the key's next request on.")
            return redirect(request.path)
    context = {
        "section": "keys" if by else "",
        "key": key,
        "by_admin": by is not None,
        # An admin with a member's secret would act in the member's name.
        "may_rotate": key.is_live and (by is None or key.owner.is_service),
        "limits": limits,
        "rotate": rotate,
        "secret": secret,
        "rules": limit_rules_of_key(key),
    }
    status = 400 if limits.errors or rotate.errors else 200
    return render(request, "accounts/key.html", context, status=status)


def _limits_form(key: ApiKey, by: User | None, data: object = None) -> KeyLimitsForm:
    values = {
        name: f"{value:,}" for name, value in own_key_limits(key).items() if value is not None
    }
    initial = {
        "models": ", ".join(key.allowed_models),
        "networks": ", ".join(key.allowed_networks),
        **values,
    }
    form = KeyLimitsForm(data, initial=initial)
    if by is not None:
        # Admins have the page of quotas for these, where a rule can also wait.
        for name in KEY_LIMITS:
            del form.fields[name]
    return form


def _save(form: KeyLimitsForm, key: ApiKey, by: User | None) -> bool:
    fields = form.cleaned_data
    try:
        with transaction.atomic():
            api_key_restrict(
                key, allowed_models=fields["models"], allowed_networks=fields["networks"], by=by
            )
            if by is None:
                own_key_limits_set(key.owner, key, {name: fields[name] for name in KEY_LIMITS})
    except ApplianceError as exc:
        form.add_error(exc.param if exc.param in form.fields else "models", exc.message)
        return False
    return True
