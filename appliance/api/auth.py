"""The API's only way in: `Authorization: Bearer KEY`. Cookies are not looked at."""

import logging
from typing import Any

from django.core.cache import cache
from django.http import HttpRequest
from ninja.security.base import AuthBase
from redis.exceptions import RedisError

from appliance.api_keys.models import ApiKey
from appliance.api_keys.services import api_key_authenticate
from appliance.brief_log import OnceAMinute
from appliance.errors import NotAuthenticated, RateLimited
from appliance.serving.booking import in_db_thread

logger = logging.getLogger(__name__)
_cache_trouble = OnceAMinute(logger, logging.WARNING)

# Past this many wrong keys a minute from one address, wrong keys get 429 instead of 401. Right
# keys still pass: an address can stand for a whole office.
MAX_FAILURES = 60
FAILURE_WINDOW_S = 60


class KeyAuth(AuthBase):
    """Puts the key on `request.auth`; raises NotAuthenticated, NotAllowed or RateLimited."""

    openapi_type = "http"
    openapi_scheme = "bearer"

    def __init__(self, scope: str) -> None:
        super().__init__()
        self._scope = scope
        self.is_async = True

    async def __call__(self, request: HttpRequest) -> Any:
        return await request_key(request, self._scope)


class MessagesKeyAuth(KeyAuth):
    """Anthropic's clients send the key as `x-api-key`."""

    async def __call__(self, request: HttpRequest) -> Any:
        if (key := request.META.get("HTTP_X_API_KEY")) and "HTTP_AUTHORIZATION" not in request.META:
            request.META["HTTP_AUTHORIZATION"] = f"Bearer {key}"
        return await super().__call__(request)


async def request_key(request: HttpRequest, scope: str) -> ApiKey:
    """The live key of this request, with its owner loaded. Also for APIs beside /v1."""
    # The server decodes header bytes as latin-1, so this gives the bytes that were sent.
    header = request.META.get("HTTP_AUTHORIZATION", "").encode("latin-1", "replace")
    address = request.META.get("REMOTE_ADDR")
    return await in_db_thread(_authenticate, header, scope, address)


def _authenticate(header: bytes, scope: str, address: str | None) -> ApiKey:
    try:
        return api_key_authenticate(header, scope=scope, address=address)
    except NotAuthenticated as exc:
        failures = _count_failure(address)
        if failures == MAX_FAILURES + 1:
            logger.warning("many wrong API keys from %s: answering 429", address)
        if failures > MAX_FAILURES:
            raise RateLimited(
                "Too many requests with a wrong API key from this address. Wait a minute.",
                retry_after_s=FAILURE_WINDOW_S,
            ) from exc
        raise


def _count_failure(address: str | None) -> int:
    """Wrong keys of this address in this minute; 0 while the cache is away.

    Fails open: a wrong key stays a 401 when nobody can count it, and opens nothing.
    """
    name = f"api-key-failures:{address}"
    try:
        cache.add(name, 0, FAILURE_WINDOW_S)
        return cache.incr(name)
    except ValueError:  # it ran out between the two calls
        return 1
    except RedisError as exc:
        _cache_trouble.log("wrong API keys are not counted: Redis does not answer: %s", exc)
        return 0
