"""Routes under /v1, and Ollama's under /api: enveloped, a key needed, no cookie read."""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse, HttpResponseNotFound
from django.http.response import HttpResponseBase
from django.urls import URLPattern, URLResolver, path, re_path
from django.views.decorators.csrf import csrf_exempt

from appliance.api.envelope import enveloped
from appliance.api.handler import OLLAMA_PATHS
from appliance.api.messages_views import messages
from appliance.api.ollama_views import ollama_api
from appliance.api.openapi import openapi
from appliance.api.responses_views import responses
from appliance.api.views import api

# Views register themselves where they are defined.
VIEWS = (messages, openapi, responses)

AsyncView = Callable[..., Awaitable[HttpResponseBase]]


def api_view(view: AsyncView) -> AsyncView:
    @wraps(view)
    async def wrapped(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        response = enveloped(request, await view(request, *args, **kwargs))
        if request.method == "HEAD" and isinstance(response, HttpResponse):
            # Content-Length stays that of the GET.
            response.content = b""
        return response

    return csrf_exempt(login_not_required(wrapped))


async def unknown(request: HttpRequest, *args: object) -> HttpResponseBase:
    return HttpResponseNotFound()


# Also for what else is under /api, behind all routes of pages there.
unknown_address = api_view(unknown)


def _routes() -> list[URLPattern | URLResolver]:
    for prefix, routes in (("v1/", api), ("api/", ollama_api)):
        patterns, _, _ = routes.urls
        for pattern in patterns:
            if pattern.name != "api-root":
                yield path(prefix + pattern.pattern._route, api_view(pattern.callback))
    yield re_path(r"^v1(/.*)?$", unknown_address)
    for ollama_path in OLLAMA_PATHS:
        yield path(ollama_path.removeprefix("/"), unknown_address)


urlpatterns: list[URLPattern | URLResolver] = list(_routes())
