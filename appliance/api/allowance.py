"""The `x-ratelimit-*` headers, with OpenAI's names: what the tightest limits still allow."""

from collections.abc import Awaitable, Callable
from functools import wraps

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils import timezone

from appliance.api.envelope import error_response
from appliance.errors import QuotaExceeded, RateLimited
from appliance.quotas.selectors import Allowance, allowances
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
    key = request.auth
    found = await in_db_thread(allowances, key.owner_id, key.pk)
    requests = [each for each in found if each.limit.name == "requests_per_minute"]
    tokens = [each for each in found if each.limit.name != "requests_per_minute"]
    for name, tightest in (("Requests", _tightest(requests)), ("Tokens", _tightest(tokens))):
        if tightest is not None:
            seconds = max(1, int((tightest.resets_at - timezone.now()).total_seconds()))
            response[f"X-RateLimit-Limit-{name}"] = str(tightest.limit.value)
            response[f"X-RateLimit-Remaining-{name}"] = str(tightest.left)
            response[f"X-RateLimit-Reset-{name}"] = f"{seconds}s"


def _tightest(found: list[Allowance]) -> Allowance | None:
    """The one with the least left; of several that are used up the one that lasts longest."""
    return min(found, key=lambda each: (each.left, -each.resets_at.timestamp()), default=None)
