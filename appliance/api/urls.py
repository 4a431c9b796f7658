"""Routes under /v1. Every view answers in the envelope, needs a key and takes no cookie."""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse, HttpResponseNotFound
from django.http.response import HttpResponseBase
from django.urls import URLPattern, URLResolver, path, re_path
from django.views.decorators.csrf import csrf_exempt

from appliance.api.envelope import enveloped
from appliance.api.views import api

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


def _routes() -> list[URLPattern | URLResolver]:
    patterns, _, _ = api.urls
    for pattern in patterns:
        if pattern.name != "api-root":
            yield path(f"v1/{pattern.pattern._route}", api_view(pattern.callback))
    yield re_path(r"^v1(/.*)?$", api_view(unknown))


urlpatterns: list[URLPattern | URLResolver] = list(_routes())
