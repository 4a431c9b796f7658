"""The `x-ratelimit-*` headers: what the caller's quota of today still allows."""

from collections.abc import Awaitable, Callable
from functools import wraps

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils import timezone

from appliance.api.envelope import error_response
from appliance.errors import QuotaExceeded, RateLimited
from appliance.quotas.services import quota_status
from appliance.serving.booking import in_db_thread

View = Callable[[HttpRequest], Awaitable[HttpResponseBase]]


def with_allowance(view: View) -> View:
    """Add the headers to answers and to refusals for a limit; without a limit there are none."""

    @wraps(view)
    async def told(request: HttpRequest) -> HttpResponseBase:
        try:
            response = await view(request)
        except (QuotaExceeded, RateLimited) as exc:
            response = error_response(exc, request.path)
        await _tell(request, response)
        return response

    return told


async def _tell(request: HttpRequest, response: HttpResponseBase) -> None:
    status = await in_db_thread(quota_status, request.auth.owner_id)
    if status.limit_tokens is None:
        return
    seconds = max(1, int((status.resets_at - timezone.now()).total_seconds()))
    response["X-RateLimit-Limit-Tokens"] = str(status.limit_tokens)
    response["X-RateLimit-Remaining-Tokens"] = str(status.left_tokens)
    response["X-RateLimit-Reset-Tokens"] = f"{seconds}s"
