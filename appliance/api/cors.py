"""Pages of other origins that may call the API from a browser: those of APPLIANCE_CORS_ORIGINS.

An allowed origin is answered with itself, never with "*", and never with leave to send cookies:
the API takes keys only. Other origins get no header at all, so their browsers keep the answer
from them.
"""

import re
from collections.abc import Awaitable, Callable
from typing import Any

from django.conf import settings

from appliance.exposure.admission import values_of

App = Callable[..., Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

# How long a browser need not ask again, in seconds.
_REMEMBER_S = b"600"
_READABLE = (
    b"Retry-After, X-Request-Id, X-RateLimit-Limit-Tokens, X-RateLimit-Remaining-Tokens, "
    b"X-RateLimit-Reset-Tokens"
)
# Names of headers, separated by commas; what else is asked for is not repeated to anybody.
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$&'*+.^_`|~, -]{1,2000}")


class CorsHeaders:
    """ASGI: answers a browser's question before a call, and marks every answer of the call."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if not settings.APPLIANCE_CORS_ORIGINS:
            await self.app(scope, receive, send)
            return
        headers = scope.get("headers") or []
        origin = _allowed_origin(headers)
        asks_first = values_of(headers, b"access-control-request-method")
        if origin and scope["method"] == "OPTIONS" and asks_first:
            await _allow(send, origin, values_of(headers, b"access-control-request-headers"))
            return
        await self.app(scope, receive, _marking(send, origin))


def _allowed_origin(headers: Headers) -> bytes | None:
    found = values_of(headers, b"origin")
    if len(found) != 1:
        return None
    return found[0].encode() if found[0] in settings.APPLIANCE_CORS_ORIGINS else None


async def _allow(send: Any, origin: bytes, asked: list[str]) -> None:
    headers = [
        *_marks(origin),
        (b"access-control-allow-methods", b"GET, HEAD, POST"),
        (b"access-control-max-age", _REMEMBER_S),
        (b"content-length", b"0"),
    ]
    # Clients send headers of their own; all a page can reach with them is what its key may do.
    if len(asked) == 1 and _HEADER_NAMES.fullmatch(asked[0]):
        headers.append((b"access-control-allow-headers", asked[0].encode()))
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _marking(send: Any, origin: bytes | None) -> Any:
    async def marked(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *_marks(origin)]}
        await send(message)

    return marked


def _marks(origin: bytes | None) -> Headers:
    # The answer differs by origin, also for those that get no header.
    vary = (b"vary", b"Origin")
    if origin is None:
        return [vary]
    return [
        vary,
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", _READABLE),
    ]
