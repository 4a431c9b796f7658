"""The models of this server: which is loaded, loading another, fetching, importing, deleting."""

from collections.abc import Callable, Mapping
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from appliance.accounts.access import admin_required
from appliance.console.model_acts import (
    MAX_NAME,
    MAX_PATH,
    loaded_name,
    model_delete,
    model_import,
    model_load,
    model_pull,
    model_stop,
)
from appliance.console.model_notices import job_shown, swap_error, swap_hide
from appliance.errors import ApplianceError, EngineUnavailable
from appliance.serving.gateway import get_backend
from appliance.serving.model_jobs import ModelJob, model_jobs
from appliance.serving.model_store import model_fits, models_list
from appliance.serving.model_swap import swap_is_for_this_run_only

_STAGES = {
    "checking": "Checking {model}",
    "draining": "Changing to {model}: running answers may finish",
    "loading": "Loading {model}",
    "rolling_back": "{model} could not be loaded: going back to the former model",
}
_JOBS = {"pull": "Fetching {target}", "import": "Importing {target}"}


@never_cache
@require_GET
@admin_required
def models(request: HttpRequest) -> HttpResponse:
    return _page(request)


@never_cache
@require_GET
@admin_required
def models_progress(request: HttpRequest) -> HttpResponse:
    """What goes on, for the page's script; asked once a second while something does."""
    return JsonResponse({"under_way": [*_swap_under_way(_state()), *_job_under_way()]})


@never_cache
@require_POST
@admin_required
def models_load(request: HttpRequest) -> HttpResponse:
    name = request.POST.get("name", "")
    return _act(request, lambda: model_load(name, request.user), "")


@never_cache
@require_POST
@admin_required
def models_get(request: HttpRequest) -> HttpResponse:
    name = request.POST.get("name", "")
    return _act(request, lambda: model_pull(name, request.user), "")


@never_cache
@require_POST
@admin_required
def models_import(request: HttpRequest) -> HttpResponse:
    path = request.POST.get("path", "")
    return _act(request, lambda: model_import(path, request.user), "")


@never_cache
@require_POST
@admin_required
def models_stop(request: HttpRequest) -> HttpResponse:
    return _act(request, lambda: model_stop(request.user), "Stopped.")


@never_cache
@require_POST
@admin_required
def models_delete(request: HttpRequest) -> HttpResponse:
    name = request.POST.get("name", "")
    return _act(request, lambda: model_delete(name, request.user), f"“{name[:80]}” is deleted.")


@never_cache
@require_POST
@admin_required
def models_forget(request: HttpRequest) -> HttpResponse:
    """Hide the notice about the last change or job."""
    if request.POST.get("what") == "swap":
        swap_hide(_state().get("swap"))
    else:
        model_jobs.forget()
    return redirect("console_models")


def _act(request: HttpRequest, act: Callable[[], None], done: str) -> HttpResponse:
    try:
        act()
    except ApplianceError as exc:
        return _page(request, exc)
    if done:
        messages.success(request, done)
    return redirect("console_models")


def _page(request: HttpRequest, fault: ApplianceError | None = None) -> HttpResponse:
    state, rows = _state(), models_list()
    loaded = loaded_name()
    fits = model_fits([row.name for row in rows if row.is_here], loaded)
    swap, job = state.get("swap"), model_jobs.job
    under_way = [*_swap_under_way(state), *_job_under_way()]
    context = {
        "section": "models",
        "state": state,
        "model": state.get("model"),
        "here": [(row, fits[row.name]) for row in rows if row.is_here],
        "to_get": [row for row in rows if not row.is_here],
        "loaded": loaded,
        "drain_s": round(settings.APPLIANCE_DRAIN_SECONDS),
        "not_for_long": swap_is_for_this_run_only(),
        "fault": fault,
        "typed": request.POST if fault else {},
        "swap_error": swap_error(swap),
        "swap": swap,
        "job": job_shown(job, swap),
        "job_words": _job_words(job) if job else "",
        "under_way": under_way,
        "may_load": state.get("state") in ("ready", "dead") and not _swap_under_way(state),
        "max_name": MAX_NAME,
        "max_path": MAX_PATH,
    }
    return render(request, "console/models.html", context, status=fault.status if fault else 200)


def _state() -> Mapping[str, Any]:
    try:
        return get_backend().state()
    except EngineUnavailable as exc:
        return {"state": "unavailable", "error": exc.message, "running": 0, "waiting": 0}


def _swap_under_way(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    swap = state.get("swap")
    if not swap or swap["stage"] not in _STAGES:
        return []
    share, doing = state.get("progress") or (0.0, "")
    what = _STAGES[swap["stage"]].format(model=swap["model"])
    if swap["stage"] == "draining":
        share, doing = None, f"{state.get('running', 0)} left"
    elif swap["stage"] == "checking":
        share, doing = None, ""
    return [{"what": what, "doing": doing, "share": share, "can_stop": False, "note": ""}]


def _job_under_way() -> list[dict[str, Any]]:
    job = model_jobs.job
    if job is None or not job.is_running:
        return []
    return [
        {
            "what": _job_words(job),
            "doing": job.doing,
            "share": job.share,
            "can_stop": True,
            "note": job.note,
        }
    ]


def _job_words(job: ModelJob) -> str:
    return _JOBS[job.kind].format(target=job.target)
