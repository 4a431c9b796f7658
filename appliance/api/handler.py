"""The way of API requests past Django's middleware.

A request of the API has a key and nothing else: no session, cookie, form token or page. So it goes
from the socket to its view on the event loop, without the thread changes that the middleware for
pages costs, and a client that leaves cancels the view itself.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from django.core.exceptions import RequestAborted
from django.core.handlers.asgi import ASGIHandler, get_script_prefix
from django.core.handlers.exception import convert_exception_to_response
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import set_script_prefix

from appliance.api.cors import CorsHeaders
from appliance.api.envelope import enveloped, error_response
from appliance.errors import BadRequest

PREFIX = "/v1"
# Ollama's names; what else is under /api is for pages.
OLLAMA_PATHS = frozenset(
    f"/api/{name}"
    for name in (
        *("chat", "generate", "tags", "show", "ps", "version", "embed", "embeddings"),
        *("pull", "push", "create", "copy", "delete"),
    )
)

Scope = dict[str, Any]
App = Callable[..., Awaitable[None]]


class ApiHandler(ASGIHandler):
    """Django's request handling with no middleware, and on the event loop alone.

    Django makes a thread for each request, for its signals and for closing the answer. Here those
    have nothing to do: database work has threads and connections of its own (`in_db_thread`).
    """

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        try:
            body = await self.read_body(receive)
        except RequestAborted:
            return
        with body:
            set_script_prefix(get_script_prefix(scope))
            request, error = self.create_request(scope, body)
            if request is None:
                await self.send_response(error, send)
                return
            answering = asyncio.ensure_future(self._answer(request, send))
            # The body was read whole: all that can still come is that the client leaves.
            leaving = asyncio.ensure_future(receive())
            try:
                await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            finally:
                leaving.cancel()
                if not answering.done():
                    answering.cancel()
                await asyncio.wait((answering, leaving))
            if not answering.cancelled():
                answering.result()

    async def _answer(self, request: HttpRequest, send: Any) -> None:
        response = await self.run_get_response(request)
        try:
            await self.send_response(response, send)
        finally:
            response.close()

    def load_middleware(self, is_async: bool = False) -> None:
        self._view_middleware: list[Any] = []
        self._template_response_middleware: list[Any] = []
        self._exception_middleware: list[Any] = []
        self._middleware_chain = convert_exception_to_response(self._get_response_async)

    def create_request(
        self, scope: Scope, body_file: Any
    ) -> tuple[HttpRequest | None, HttpResponse | None]:
        request, error = super().create_request(scope, body_file)
        if request is None and error is not None:
            error = error_response(
                BadRequest("The server cannot read this request."), scope["path"]
            )
        return request, error

    async def run_get_response(self, request: HttpRequest) -> HttpResponseBase:
        # What failed outside of every view comes as a page.
        return enveloped(request, await super().run_get_response(request))


class ApiPaths:
    """ASGI: what is under /v1, and Ollama's paths, goes to `api`, the rest to `pages`."""

    def __init__(self, api: App, pages: App) -> None:
        self.api = CorsHeaders(api)
        self.pages = pages

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        path = scope["path"]
        is_api = path == PREFIX or path.startswith(f"{PREFIX}/") or path in OLLAMA_PATHS
        await (self.api if is_api else self.pages)(scope, receive, send)
