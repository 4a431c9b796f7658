"""`/healthz`, `/readyz` and `/metrics`: for machines, so without the log-in page."""

import sys

import prometheus_client
from asgiref.sync import sync_to_async
from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template.loader import render_to_string
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from appliance.api_keys.services import api_key_authenticate
from appliance.errors import ApplianceError, NotAllowed, NotAuthenticated
from appliance.exposure.middleware import error_json
from appliance.serving.booking import STORAGE_FAULTS, storage_unavailable
from appliance.serving.health import can_act, readiness
from appliance.serving.metrics import REGISTRY


@login_not_required
@never_cache
@require_safe
async def healthz(request: HttpRequest) -> HttpResponse:
    alive = can_act()
    return _probed({"status": "ok" if alive else "dead"}, alive)


@login_not_required
@never_cache
@require_safe
async def readyz(request: HttpRequest) -> HttpResponse:
    found = await readiness()
    body: dict[str, object] = {"status": found.status}
    if found.progress is not None:
        body |= {"progress": round(found.progress, 3), "doing": found.doing}
    return _probed(body, found.is_ready)


def _probed(body: dict[str, object], is_good: bool) -> HttpResponse:
    response = JsonResponse(body, status=200 if is_good else 503)
    # Probes come every second: a line each while the model loads would fill the log.
    response._has_been_logged = True
    return response


def page_failed(request: HttpRequest) -> HttpResponse:
    """Django's handler of what a page did not catch; it asks while the fault is being handled."""
    exc = sys.exc_info()[1]
    # No context processors: they ask the session and the user, and so the database.
    words: dict[str, object] = {"request": request}
    if not isinstance(exc, STORAGE_FAULTS):
        return HttpResponse(render_to_string("500.html", words), status=500)
    told = storage_unavailable(exc)
    words |= {"head": "Not now", "message": told.message, "number": told.status}
    response = HttpResponse(render_to_string("500.html", words), status=told.status)
    response["Retry-After"] = str(told.retry_after_s)
    return response


@login_not_required
@never_cache
@require_safe
async def metrics(request: HttpRequest) -> HttpResponse:
    """Not behind the log-in page, as a monitor reads it: `_check_admin` guards it, always."""
    try:
        await sync_to_async(_check_admin)(request)
    except (ApplianceError, *STORAGE_FAULTS) as exc:
        told = exc if isinstance(exc, ApplianceError) else storage_unavailable(exc)
        response = HttpResponse(error_json(told), "application/json", status=told.status)
        if isinstance(told, NotAuthenticated):
            response["WWW-Authenticate"] = "Bearer"
        return response
    return HttpResponse(
        prometheus_client.generate_latest(REGISTRY), prometheus_client.CONTENT_TYPE_LATEST
    )


def _check_admin(request: HttpRequest) -> None:
    """A key decides alone: a bad one never falls back to the session."""
    header = request.META.get("HTTP_AUTHORIZATION")
    if header is not None:
        api_key_authenticate(header, scope="admin", address=request.META.get("REMOTE_ADDR"))
    elif not request.user.is_authenticated:
        raise NotAuthenticated("Metrics need an API key with scope admin, or an admin's session.")
    elif not request.user.is_admin:
        raise NotAllowed("Only admins may read metrics.")
