"""`/api/engine`: the engine's state as JSON, and live tuning, for scripts and the console's pages.

An API key with scope admin, or an admin's session; a session's changes need the CSRF token.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
from asgiref.sync import sync_to_async
from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.middleware.csrf import CsrfViewMiddleware
from django.views.decorators.csrf import csrf_exempt

from appliance.accounts.models import User
from appliance.api_keys.services import api_key_authenticate
from appliance.console.model_acts import model_load
from appliance.console.selectors import settings_version
from appliance.console.services import engine_change
from appliance.errors import ApplianceError, BadRequest, NotAllowed, NotAuthenticated
from appliance.exposure.middleware import error_json
from appliance.serving.booking import STORAGE_FAULTS, storage_unavailable
from appliance.serving.gateway import get_backend
from appliance.serving.live_settings import live_state

MAX_CHANGE_BYTES = 16 * 1024
MAX_WHY = 200


def error_response(exc: ApplianceError) -> HttpResponse:
    response = HttpResponse(error_json(exc), content_type="application/json", status=exc.status)
    if exc.status == HTTPStatus.UNAUTHORIZED:
        response["WWW-Authenticate"] = "Bearer"
    if exc.retry_after_s is not None:
        response["Retry-After"] = str(round(exc.retry_after_s))
    response["Cache-Control"] = "no-store"
    return response


@login_not_required
@csrf_exempt
async def engine(request: HttpRequest) -> HttpResponse:
    """Not behind the log-in page, as scripts call it: `_admin_of` admits, always."""
    status = HTTPStatus.OK
    try:
        admin = await sync_to_async(_admin_of)(request)
        if request.method in ("GET", "HEAD"):
            state = live_state(get_backend())
        elif request.method == "PATCH":
            changes = _json_object(request)
            if "model" in changes:
                state, status = await _model_changed(changes, admin), HTTPStatus.ACCEPTED
            else:
                why = _why(changes)
                state = await engine_change(changes, admin, if_version=_if_match(request), why=why)
        else:
            return _method_not_allowed()
    except ApplianceError as exc:
        return error_response(exc)
    except STORAGE_FAULTS as exc:
        return error_response(storage_unavailable(exc))
    body = orjson.dumps({**state, "settings_version": settings_version(state)})
    response = HttpResponse(body, content_type="application/json", status=status)
    response["Cache-Control"] = "no-store"
    return response


def _admin_of(request: HttpRequest) -> User:
    """The admin who calls. A header decides alone: a bad key never falls back to the cookie."""
    header = request.META.get("HTTP_AUTHORIZATION")
    if header is not None:
        key = api_key_authenticate(header, scope="admin", address=request.META.get("REMOTE_ADDR"))
        return key.owner
    user = request.user
    if not user.is_authenticated:
        raise NotAuthenticated(
            "Send an API key with scope admin (Authorization: Bearer KEY), or sign in as an admin."
        )
    if not user.is_admin:
        raise NotAllowed("Only an admin may see or change the engine.")
    if CsrfViewMiddleware(lambda _: HttpResponse()).process_view(request, None, (), {}):
        raise NotAllowed("The CSRF token is missing or wrong. Load the page again.")
    return user


async def _model_changed(changes: Mapping[str, Any], admin: User) -> Mapping[str, Any]:
    """A model is changed alone, as it takes its time; the state's `swap` tells how it goes."""
    name = changes["model"]
    if len(changes) > 1 or not isinstance(name, str):
        raise BadRequest(
            'Change the model by itself, with its name: {"model": "smollm2-135m-instruct"}.',
            param="model",
        )
    await sync_to_async(model_load)(name, admin)
    return live_state(get_backend())


def _json_object(request: HttpRequest) -> dict[str, Any]:
    # A form on another site cannot send this type without the browser asking first.
    if request.content_type != "application/json":
        raise BadRequest("Send the body as JSON with Content-Type: application/json.")
    if len(request.body) > MAX_CHANGE_BYTES:
        raise BadRequest(f"The body is larger than {MAX_CHANGE_BYTES:,} bytes.")
    try:
        changes = orjson.loads(request.body)
    except orjson.JSONDecodeError:
        raise BadRequest("The body is not JSON.") from None
    if not isinstance(changes, dict):
        raise BadRequest('The body must be a JSON object, for example {"slots": 4}.')
    return changes


def _why(changes: dict[str, Any]) -> str:
    """Takes the admin's own words for the history out of the body; "" without any."""
    why = changes.pop("why", "")
    if not isinstance(why, str) or len(why) > MAX_WHY or not why.isprintable():
        raise BadRequest(f"why is a line of at most {MAX_WHY} letters.", param="why")
    return why.strip()


def _if_match(request: HttpRequest) -> str | None:
    value = request.META.get("HTTP_IF_MATCH")
    return None if value is None else value.strip().strip('"')


def _method_not_allowed() -> HttpResponse:
    exc = BadRequest("GET and PATCH are allowed here.")
    response = HttpResponse(
        error_json(exc), content_type="application/json", status=HTTPStatus.METHOD_NOT_ALLOWED
    )
    response["Allow"] = "GET, HEAD, PATCH"
    return response
