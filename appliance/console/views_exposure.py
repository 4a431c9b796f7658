"""The page that says who can reach the server, and where admins change it."""

from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from appliance.accounts.access import admin_required
from appliance.console.audit import change_words
from appliance.console.exposure_forms import AddressForm, CallersForm
from appliance.console.models import AuditRecord
from appliance.console.reach_table import reach_columns, reach_faults, reach_rows
from appliance.errors import ApplianceError
from appliance.exposure.models import ExposureSettings
from appliance.exposure.policy import policy_current
from appliance.exposure.reach import listening_sockets, own_addresses
from appliance.exposure.services import (
    exposure_change,
    exposure_settings,
    exposure_trial,
    exposure_trial_keep,
    exposure_trial_take_back,
)

TRIAL_S = 60
SHOWN_CHANGES = 20
_FORMS: dict[str, type[CallersForm] | type[AddressForm]] = {
    "callers": CallersForm,
    "address": AddressForm,
}


@never_cache
@require_GET
@admin_required
def exposure(request: HttpRequest) -> HttpResponse:
    return _page(request)


@never_cache
@require_POST
@admin_required
def exposure_save(request: HttpRequest, part: str) -> HttpResponse:
    form = _FORMS[part](request.POST)
    if form.is_valid():
        try:
            _change(request, form.cleaned_data)
        except ApplianceError as exc:
            form.add_reason(exc)
        else:
            return redirect("console_exposure")
    return _page(request, **{part: form})


@never_cache
@require_POST
@admin_required
def exposure_back(request: HttpRequest, record_id: int) -> HttpResponse:
    """Set the fields of one change to what they were before it."""
    record = get_object_or_404(AuditRecord, pk=record_id, action__startswith="exposure.")
    try:
        _change(request, record.detail["before"])
    except ApplianceError as exc:
        messages.error(request, exc.message)
    return redirect("console_exposure")


@never_cache
@require_POST
@admin_required
def exposure_trial_end(request: HttpRequest, how: str) -> HttpResponse:
    try:
        if how == "keep":
            exposure_trial_keep(request.user)
            messages.success(request, "The change is kept.")
        else:
            exposure_trial_take_back(request.user)
            messages.success(request, "The change is taken back.")
    except ApplianceError as exc:
        messages.error(request, exc.message)
    return redirect("console_exposure")


def _change(request: HttpRequest, values: dict[str, Any]) -> None:
    before = exposure_settings().changed_at
    row = exposure_change(
        request.user,
        client_address=request.META.get("REMOTE_ADDR"),
        client_host=request.get_host(),
        trial_s=TRIAL_S,
        **values,
    )
    if row.changed_at == before:
        messages.info(request, "Nothing was changed: the values are the same.")
    elif exposure_trial() is None:
        at_start = "bind_host" in values or "port" in values
        when = "It holds from the next start of the server on." if at_start else "It holds now."
        messages.success(request, f"Saved. {when}")


def _page(
    request: HttpRequest,
    *,
    callers: CallersForm | None = None,
    address: AddressForm | None = None,
) -> HttpResponse:
    row = exposure_settings()
    trial = exposure_trial()
    sockets = listening_sockets()
    own_port = int(request.META["SERVER_PORT"])
    columns = reach_columns(policy_current(), sockets, own_addresses(), own_port)
    callers_form = callers or CallersForm(initial=CallersForm.values_of(row))
    address_form = address or AddressForm(initial=AddressForm.values_of(row))
    left_s = (trial.ends_at - timezone.now()).total_seconds() if trial else 0
    context = {
        "section": "exposure",
        "row": row,
        "columns": columns,
        "parts": reach_rows(columns),
        "faults": reach_faults(columns),
        "sockets": sockets,
        "waits_for_start": not any(_is_bound(row, s.address, s.port) for s in sockets),
        "tested_at": timezone.now(),
        "callers": callers_form,
        "address": address_form,
        "hosts": policy_current().hosts,
        "client_address": request.META.get("REMOTE_ADDR", "unknown"),
        "trial": trial,
        "trial_words": change_words(trial.before, trial.after) if trial else "",
        "trial_s": TRIAL_S,
        "left_s": max(0, round(left_s)),
        "left_words": f"{max(0, round(left_s)) // 60}:{max(0, round(left_s)) % 60:02}",
        "history": _history(row),
    }
    status = 400 if callers_form.errors or address_form.errors else 200
    return render(request, "console/exposure.html", context, status=status)


def _is_bound(row: ExposureSettings, address: str, port: int) -> bool:
    wanted = "127.0.0.1" if row.bind_host == "localhost" else row.bind_host.strip("[]")
    return address == wanted and port == row.port


def _history(row: ExposureSettings) -> list[dict[str, Any]]:
    """The newest changes, each with what it takes to go back to before it."""
    records = AuditRecord.objects.filter(action__startswith="exposure.")[:SHOWN_CHANGES]
    ends = {
        "exposure.try": "on trial",
        "exposure.keep": "kept",
        "exposure.take_back": "taken back",
        "exposure.change": "",
    }
    return [
        {
            "id": record.pk,
            "at": record.at,
            "who": record.actor_name,
            "how": ends.get(record.action, ""),
            "words": change_words(record.detail["before"], record.detail["after"]),
            "can_go_back": record.action != "exposure.try"
            and any(getattr(row, n, v) != v for n, v in record.detail["before"].items()),
        }
        for record in records
    ]
