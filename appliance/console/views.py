from http import HTTPStatus

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET, require_POST

from appliance.accounts.access import admin_required
from appliance.console.api import error_response
from appliance.console.services import request_kill
from appliance.errors import ApplianceError


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
