"""The capacity test's page: form, running test, results. Admins only."""

from typing import Any

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from appliance.accounts.access import admin_required
from appliance.capacity import page
from appliance.capacity.forms import CapacityForm
from appliance.capacity.models import CapacityRun
from appliance.capacity.plan import Plan
from appliance.capacity.selectors import levels_of, run_as_dict, runs_shown, team_mix
from appliance.capacity.services import run_of, run_stop, runs_heal
from appliance.capacity.start import run_start
from appliance.capacity.table import as_csv
from appliance.console.selectors import settings_version
from appliance.errors import ApplianceError, NotFound


@never_cache
@require_GET
@admin_required
def capacity(request: HttpRequest) -> HttpResponse:
    return _page(request, CapacityForm(team=team_mix(), initial=_last_values()))


@never_cache
@require_POST
@admin_required
def start(request: HttpRequest) -> HttpResponse:
    form = CapacityForm(request.POST, team=team_mix())
    if not form.is_valid():
        return _page(request, form, status=400)
    try:
        run_start(form.plan(), request.user)
    except ApplianceError as exc:
        form.add_error(exc.param if exc.param in form.fields else None, exc.message)
        return _page(request, form, status=exc.status)
    return redirect("capacity")


@never_cache
@require_POST
@admin_required
def stop(request: HttpRequest, run_id: int) -> HttpResponse:
    run_stop(_run(run_id).pk, request.user)
    messages.success(request, "The test is being stopped. What was measured is kept.")
    return redirect("capacity")


@never_cache
@require_GET
@admin_required
def status(request: HttpRequest, run_id: int) -> HttpResponse:
    runs_heal()
    return JsonResponse(page.status(_run(run_id)))


@never_cache
@require_GET
@admin_required
def export(request: HttpRequest, run_id: int, kind: str) -> HttpResponse:
    run = _run(run_id)
    if kind == "json":
        response: HttpResponse = JsonResponse(run_as_dict(run), json_dumps_params={"indent": 1})
    else:
        text = as_csv(levels_of(run), Plan.from_dict(run.plan).limits)
        response = HttpResponse(text, content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="capacity-{run.pk}.{kind}"'
    return response


def _page(request: HttpRequest, form: CapacityForm, status: int = 200) -> HttpResponse:
    runs_heal()
    state, runs, team = page.engine_state(), runs_shown(), team_mix()
    running = next((run for run in runs if run.is_open), None)
    ended = [run for run in runs if not run.is_open]
    chosen = _chosen(request, "run", ended) or next(iter(ended), None)
    other = _chosen(request, "with", ended)
    context: dict[str, Any] = {
        "section": "capacity",
        "form": form,
        "team": team,
        "state": state,
        "slots": page.slots_now(state),
        "version": settings_version(state),
        "running": running,
        "running_status": running and page.status(running),
        "runs": [page.listed(run) for run in ended],
        "chosen": chosen and page.shown(chosen, page.slots_now(state)),
        "status_url": running and reverse("capacity_status", args=[running.pk]),
    }
    if chosen is not None and other is not None and other.pk != chosen.pk:
        context["other"] = page.shown(other, None)
        context["compared"] = page.compared(chosen, other)
        # In the table's heads: what tells the two apart.
        is_one_day = chosen.created_at.date() == other.created_at.date()
        context["short"] = "H:i" if is_one_day else "j M"
    return render(request, "capacity/capacity.html", context, status=status)


def _last_values() -> dict[str, object]:
    """As the newest test was asked for."""
    # Tests of a terminal may be of another server, and for times that the form does not offer.
    newest = CapacityRun.objects.filter(started_by__isnull=False).first()
    return {} if newest is None else CapacityForm.values_of(Plan.from_dict(newest.plan))


def _chosen(request: HttpRequest, name: str, runs: list[CapacityRun]) -> CapacityRun | None:
    wanted = request.GET.get(name, "")
    return next((run for run in runs if str(run.pk) == wanted), None)


def _run(run_id: int) -> CapacityRun:
    try:
        return run_of(run_id)
    except NotFound as exc:
        raise Http404(exc.message) from exc
