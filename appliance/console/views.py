from dataclasses import asdict
from http import HTTPStatus

from asgiref.sync import sync_to_async
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_GET, require_POST

from appliance.accounts.access import admin_required
from appliance.console.api import MAX_WHY, error_response
from appliance.console.feed import current_feed
from appliance.console.load_history import RANGES, points, stored_rows
from appliance.console.replay import past_requests, replay
from appliance.console.replay_rules import replay_rules
from appliance.console.samples import COLUMNS
from appliance.console.selectors import (
    boot_settings,
    changes_made,
    ledger_requests,
    settings_version,
)
from appliance.console.services import request_kill
from appliance.console.setting_catalogue import fields_of
from appliance.console.views_weights import weights_shown
from appliance.errors import ApplianceError, BadRequest, EngineUnavailable
from appliance.serving.booking import in_db_thread
from appliance.serving.gateway import get_backend
from appliance.serving.live_settings import live_state


@require_GET
@admin_required
def live(request: HttpRequest) -> HttpResponse:
    return render(request, "console/live.html", {"section": "live"})


@require_POST
async def kill(request: HttpRequest, request_id: str) -> HttpResponse:
    user = await request.auser()
    if not user.is_admin:
        raise PermissionDenied
    try:
        await request_kill(request_id, user)
    except ApplianceError as exc:
        return error_response(exc)
    return HttpResponse(status=HTTPStatus.NO_CONTENT)


@require_GET
async def load(request: HttpRequest) -> HttpResponse:
    """The plotted numbers of a longer time, one row a point; times are unix seconds."""
    if not (await request.auser()).is_admin:
        raise PermissionDenied
    name = request.GET.get("range", "")
    if name not in RANGES:
        allowed = ", ".join(RANGES)
        return error_response(BadRequest(f"range must be one of {allowed}.", param="range"))
    feed = current_feed()
    stored = await in_db_thread(stored_rows, name, timezone.now())
    rows = points(name, stored, feed.picture.samples, feed.epoch)
    return JsonResponse({"columns": COLUMNS, "rows": rows, "point_s": RANGES[name].point_s})


@require_GET
async def tuning(request: HttpRequest) -> HttpResponse:
    if not (await request.auser()).is_admin:
        raise PermissionDenied
    try:
        state = live_state(get_backend())
    except EngineUnavailable as exc:
        state = {"state": "unavailable", "error": exc.message}
    context = {
        "section": "tuning",
        "state": state,
        "fields": fields_of(state),
        "max_why": MAX_WHY,
        "version": settings_version(state),
        "boot": boot_settings(state),
        "weights": await sync_to_async(weights_shown)(),
        "history": await changes_made(),
    }
    return await sync_to_async(render)(request, "console/tuning.html", context)


@require_GET
async def tuning_replay(request: HttpRequest) -> HttpResponse:
    """The last hour's requests under the settings of the query, the others as they are."""
    if not (await request.auser()).is_admin:
        raise PermissionDenied
    try:
        rules = replay_rules(live_state(get_backend()), request.GET.dict())
    except ApplianceError as exc:
        return error_response(exc)
    feed = current_feed()
    seen = past_requests(feed.picture.requests.rows(), feed.picture.now)
    ids = {row.get("id") for row in feed.picture.requests.rows()}
    past = await in_db_thread(ledger_requests, feed.epoch, feed.picture.now, ids)
    requests = sorted([*past, *seen], key=lambda one: one.came)
    return JsonResponse(asdict(await sync_to_async(replay)(requests, rules)))
