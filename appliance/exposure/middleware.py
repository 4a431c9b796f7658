"""The outermost layer of HTTP and sockets: refuses what must not reach routes, sessions or keys."""

import json
import logging
from base64 import b64encode
from collections.abc import Awaitable, Callable
from hashlib import sha256
from html import escape
from typing import Any

from appliance.errors import ApplianceError, BadRequest, BodyTooLarge
from appliance.exposure.admission import Scope, admit, values_of
from appliance.exposure.policy import policy_current

logger = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SOCKET_REFUSED = 4403

_STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;margin:0;display:grid;"
    "min-height:100vh;place-items:center}main{max-width:380px;padding:24px;overflow-wrap:anywhere}"
    "h1{font-size:20px;margin:0}main>p:first-child{font-weight:600}small{opacity:.75}"
)
_STYLE_HASH = b64encode(sha256(_STYLE.encode()).digest()).decode()
_PAGE_POLICY = f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'".encode()


class ExposureMiddleware:
    """Pure ASGI. See `admission.admit` for the checks; it also bounds the request body."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        policy = policy_current()
        try:
            admitted = admit(scope, policy)
            if scope["type"] == "http":
                _check_declared_length(scope, policy.max_body_bytes)
        except ApplianceError as exc:
            client = scope.get("client") or ("unknown",)
            logger.warning(
                "refused %s %r from %s: %s",
                scope["type"],
                scope.get("path", ""),
                client[0],
                exc.message,
            )
            await _refuse(scope, receive, send, exc)
            return
        if scope["type"] == "websocket":
            await self.app(admitted, receive, send)
            return
        await self._call_bounded(admitted, receive, send, policy.max_body_bytes)

    async def _call_bounded(
        self, scope: Scope, receive: Receive, send: Send, max_body_bytes: int
    ) -> None:
        """Run the app; a body past the limit ends for it as a disconnect, for the caller as 413."""
        num_bytes = 0
        started = False

        async def bounded_receive() -> dict[str, Any]:
            nonlocal num_bytes
            if num_bytes > max_body_bytes:
                return {"type": "http.disconnect"}
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > max_body_bytes:
                    return {"type": "http.disconnect"}
            return message

        async def noting_send(message: dict[str, Any]) -> None:
            nonlocal started
            started = True
            await send(message)

        await self.app(scope, bounded_receive, noting_send)
        if num_bytes > max_body_bytes and not started:
            await _refuse_http(scope, send, body_too_large(max_body_bytes))


def body_too_large(max_body_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The request body is larger than the {max_body_bytes:,} bytes that are allowed. "
        "Send less text in one request."
    )


def error_json(exc: ApplianceError) -> bytes:
    """The error envelope that OpenAI clients read."""
    error = {
        "message": exc.message,
        "type": exc.error_type,
        "param": exc.param,
        "code": exc.code,
    }
    return json.dumps({"error": error}).encode()


def _check_declared_length(scope: Scope, max_body_bytes: int) -> None:
    declared = values_of(scope.get("headers") or [], b"content-length")
    if not declared:
        return
    text = declared[0].strip()
    if len(declared) > 1 or not (text.isascii() and text.isdigit()):
        raise BadRequest("The Content-Length header must be one whole number.")
    # Compared by digits first: int() of a very long number is slow and then refused.
    if len(text) > 18 or int(text) > max_body_bytes:
        raise body_too_large(max_body_bytes)


async def _refuse(scope: Scope, receive: Receive, send: Send, exc: ApplianceError) -> None:
    if scope["type"] == "http":
        await _refuse_http(scope, send, exc)
        return
    await receive()  # websocket.connect must be taken before the answer
    await send({"type": "websocket.close", "code": SOCKET_REFUSED, "reason": exc.message[:100]})


def _error_page(exc: ApplianceError) -> bytes:
    """For people. It stands alone: style sheets are refused to the same caller."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Refused · Blockhouse</title><style>{_STYLE}</style>"
        f"<main><p>Blockhouse</p><h1>Refused</h1><p>{escape(exc.message)}</p>"
        f"<small>Error {exc.status}</small></main></html>"
    ).encode()


async def _refuse_http(scope: Scope, send: Send, exc: ApplianceError) -> None:
    accepts = values_of(scope.get("headers") or [], b"accept")
    is_page = any("text/html" in value for value in accepts)
    body = _error_page(exc) if is_page else error_json(exc)
    await send(
        {
            "type": "http.response.start",
            "status": exc.status,
            "headers": [
                (b"content-type", b"text/html" if is_page else b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"cache-control", b"no-store"),
                (b"x-content-type-options", b"nosniff"),
                (b"content-security-policy", _PAGE_POLICY),
                (b"connection", b"close"),
            ],
        }
    )
    await send({"type": "http.response.body", "body": body})
