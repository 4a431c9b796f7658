"""A refusal that Django has no template for gets a page of ours when a browser asks."""

from collections.abc import Awaitable, Callable
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed
from django.template.loader import render_to_string
from django.utils.decorators import sync_and_async_middleware


@sync_and_async_middleware
def method_pages(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """405: whoever presses Enter in the address bar after a form asks for such an address."""

    def paged(request: HttpRequest, response: HttpResponse) -> HttpResponse:
        is_bare = isinstance(response, HttpResponseNotAllowed) and not response.content
        if is_bare and "text/html" in request.headers.get("Accept", ""):
            response.content = render_to_string("405.html", {"request": request})
            response["Content-Type"] = "text/html; charset=utf-8"
        return response

    if not iscoroutinefunction(get_response):
        return lambda request: paged(request, get_response(request))

    async def answer(request: HttpRequest) -> HttpResponse:
        got: Awaitable[HttpResponse] = get_response(request)
        return paged(request, await got)

    return answer
