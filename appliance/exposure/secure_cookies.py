"""Cookies that were given over TLS come back over TLS alone.

A fixed setting would lock out those who use the plain address of a server on their own machine, so
the request decides. Behind a proxy the scheme is the one that a trusted proxy told.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.decorators import sync_and_async_middleware


@sync_and_async_middleware
def secure_cookies(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    def marked(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        if request.is_secure():
            for cookie in response.cookies.values():
                cookie["secure"] = True
        return response

    if not iscoroutinefunction(get_response):
        return lambda request: marked(request, get_response(request))

    async def answer(request: HttpRequest) -> HttpResponseBase:
        got: Awaitable[HttpResponseBase] = get_response(request)
        return marked(request, await got)

    return answer
