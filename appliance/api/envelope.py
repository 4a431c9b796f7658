"""Error envelopes: every answer of the API that is no success has its dialect's form.

OpenAI's under /v1, Anthropic's under /v1/messages, Ollama's under /api.
"""

import http
import logging
import math
from typing import Any

import orjson
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase

from appliance.errors import ApplianceError, BadRequest, NotFound
from appliance.serving.booking import STORAGE_FAULTS, storage_unavailable

logger = logging.getLogger(__name__)

JSON = "application/json"


class MethodNotAllowed(ApplianceError):
    status = 405
    code = "method_not_allowed"
    error_type = "invalid_request_error"


class UnsupportedMediaType(ApplianceError):
    status = 415
    code = "unsupported_media_type"
    error_type = "invalid_request_error"


class InternalError(ApplianceError):
    """A fault of ours: the caller learns only that, the log the rest."""

    def __init__(self) -> None:
        super().__init__("The server failed on this request. Try again; tell an admin if it stays.")


MESSAGES_PATH = "/v1/messages"
OLLAMA_PATH = "/api/"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_fields(exc: ApplianceError, path: str = "/v1") -> dict[str, Any]:
    if path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/"):
        default = "api_error" if exc.status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_TYPES.get(exc.status, default)
        return {"type": "error", "error": {"type": kind, "message": exc.message}}
    if path.startswith(OLLAMA_PATH):
        return {"error": exc.message}
    return {
        "error": {
            "message": exc.message,
            "type": exc.error_type,
            "param": exc.param,
            "code": exc.code,
        }
    }


def json_response(body: Any, *, status: int = 200) -> HttpResponse:
    content = orjson.dumps(body)
    response = HttpResponse(content, status=status, content_type=JSON)
    response["Content-Length"] = str(len(content))
    response["Cache-Control"] = "no-store"
    response["X-Content-Type-Options"] = "nosniff"
    return response


def error_response(exc: ApplianceError, path: str = "/v1") -> HttpResponse:
    response = json_response(error_fields(exc, path), status=exc.status)
    if exc.status == http.HTTPStatus.UNAUTHORIZED:
        response["WWW-Authenticate"] = 'Bearer realm="API key"'
    if exc.retry_after_s is not None:
        response["Retry-After"] = str(max(1, math.ceil(exc.retry_after_s)))
    elif exc.status == http.HTTPStatus.SERVICE_UNAVAILABLE:
        response["Retry-After"] = "5"
    if exc.code == "insufficient_quota":
        # The official clients would try again at once.
        response["X-Should-Retry"] = "false"
    return response


def exception_response(exc: Exception, path: str) -> HttpResponse:
    if isinstance(exc, ApplianceError):
        return error_response(exc, path)
    if isinstance(exc, STORAGE_FAULTS):
        return error_response(storage_unavailable(exc), path)
    logger.error("request failed", exc_info=exc)
    return error_response(InternalError(), path)


def enveloped(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
    """`response` itself, or the envelope in place of an error that is not one yet."""
    if response.status_code < 400 or response.get("Content-Type", "").startswith(JSON):
        return response
    error = _plain_error(request, response.status_code)
    error.status = response.status_code
    replaced = error_response(error, request.path)
    if "Allow" in response:
        replaced["Allow"] = response["Allow"]
    return replaced


def _plain_error(request: HttpRequest, status: int) -> ApplianceError:
    where = f"{request.method} {request.path[:200]}"
    if status == http.HTTPStatus.METHOD_NOT_ALLOWED:
        return MethodNotAllowed(f"{where} is not possible; the Allow header names what is.")
    if status >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
        return InternalError()
    if status == http.HTTPStatus.NOT_FOUND:
        return NotFound(f"There is nothing at {where}. See /v1/models for a start.")
    return BadRequest("The server cannot read this request.")
