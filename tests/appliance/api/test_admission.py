"""Who is let in: keys, scopes, quotas, a busy or failing server."""

import asyncio
import json
import logging
from typing import Any

import pytest
from django.core.cache.backends.redis import RedisCache

from appliance.accounts.models import User
from appliance.accounts.services import user_set_active
from appliance.api import auth
from appliance.api_keys.models import ApiKey
from appliance.api_keys.services import api_key_issue, api_key_revoke
from appliance.brief_log import OnceAMinute
from appliance.errors import (
    ApplianceError,
    BadRequest,
    EngineUnavailable,
    QueueIsFull,
    RateLimited,
)
from appliance.quotas.models import UsageRecord
from appliance.quotas.selectors import quota_status
from appliance.serving.booking import bookings_wait, in_db_thread
from tests.appliance.api.asgi_caller import DEADLINE_S, Caller
from tests.appliance.api.checks import CHAT, GOOD, check_error
from tests.appliance.fake_backend import FakeBackend
from tests.appliance.limits import tokens_a_day
from tests.e2e.server import free_port

# ---- the key


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Basic x",
        b"Bearer caf\xe9",
        "Bearer “smart”".encode(),
        b"Bearer a\0b",
        b"Bearer " + b"x" * 8192,
        "Bearer bh_" + "A" * 40,
        b"Bearer bh_a, Bearer bh_b",
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", CHAT])
async def test_c08_without_a_known_key_every_route_is_401(
    stranger: Caller, header: str | bytes | None, path: str
) -> None:
    headers = {} if header is None else {"authorization": header}
    method = "GET" if path == "/v1/models" else "POST"
    answer = await stranger.send(method, path, GOOD, headers=headers).start()
    error = await check_error(answer, 401, "invalid_api_key")
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert error["type"] == "authentication_error"
    assert "Traceback" not in json.dumps(error)


async def test_c06_a_key_in_the_query_is_no_key(caller: Caller) -> None:
    secret, caller.secret = caller.secret, None
    for name in ("api_key", "token", "key"):
        answer = await caller.get("/v1/models", query=f"{name}={secret}".encode())
        await check_error(answer, 401, "invalid_api_key")


async def test_c22_a_session_cookie_opens_nothing_under_v1(
    stranger: Caller, bob: User, client: Any
) -> None:
    await in_db_thread(client.force_login, bob)
    cookie = {"cookie": f"sessionid={client.cookies['sessionid'].value}"}
    await check_error(await stranger.get("/v1/models", headers=cookie), 401, "invalid_api_key")
    await check_error(await stranger.post(CHAT, GOOD, headers=cookie), 401, "invalid_api_key")


async def test_revoking_and_switching_off_count_from_the_next_request(
    caller: Caller, bob: User
) -> None:
    assert (await caller.get("/v1/models")).status == 200
    await in_db_thread(user_set_active, bob, False)
    await check_error(await caller.get("/v1/models"), 401, "invalid_api_key")
    await in_db_thread(user_set_active, bob, True)
    assert (await caller.get("/v1/models")).status == 200
    await in_db_thread(api_key_revoke, await in_db_thread(ApiKey.objects.get))
    await check_error(await caller.get("/v1/models"), 401, "invalid_api_key")


async def test_a_missing_scope_is_403(bob: User, backend: FakeBackend) -> None:
    _, secret = await in_db_thread(api_key_issue, bob, "reader", ["models"])
    error = await check_error(await Caller(secret).chat(), 403, "not_allowed")
    assert error["type"] == "permission_error"


async def test_a_key_for_other_models_is_403_and_lists_nothing(
    bob: User, backend: FakeBackend
) -> None:
    _, secret = await in_db_thread(api_key_issue, bob, "x", allowed_models=["other"])
    await check_error(await Caller(secret).chat(), 403, "not_allowed", param="model")
    listed = await (await Caller(secret).get("/v1/models")).json()
    assert listed["data"] == []
    _, secret = await in_db_thread(api_key_issue, bob, "y", allowed_models=["scripted"])
    assert (await Caller(secret).chat()).status == 200


async def test_c23_many_wrong_keys_get_429_and_right_keys_still_pass(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "MAX_FAILURES", 3)
    wrong = Caller("bh_" + "A" * 40)
    for _ in range(3):
        await check_error(await wrong.get("/v1/models"), 401, "invalid_api_key")
    answer = await wrong.get("/v1/models")
    await check_error(answer, 429, "rate_limit_exceeded")
    assert int(answer.headers["retry-after"]) >= 1
    assert (await caller.get("/v1/models")).status == 200


async def test_c23_wrong_keys_stay_401_while_nobody_can_count_them(
    caller: Caller,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gone = RedisCache(f"redis://127.0.0.1:{free_port()}/0", {})
    monkeypatch.setattr(auth, "cache", gone)
    monkeypatch.setattr(auth, "_cache_trouble", OnceAMinute(auth.logger, logging.WARNING))
    monkeypatch.setattr(auth, "MAX_FAILURES", 1)
    wrong = Caller("bh_" + "A" * 40)
    for _ in range(4):
        await check_error(await wrong.get("/v1/models"), 401, "invalid_api_key")
    said = [r.getMessage() for r in caplog.records if r.name == "appliance.api.auth"]
    assert len(said) == 1
    assert "not counted" in said[0]
    assert (await caller.get("/v1/models")).status == 200


# ---- admission


async def test_a_prompt_that_is_too_long_says_what_is_allowed(
    caller: Caller, backend: FakeBackend
) -> None:
    for stream in (False, True):
        answer = await caller.chat("word " * 1000, stream=stream)
        error = await check_error(answer, 400, "context_length_exceeded", param="messages")
        assert "1000" in error["message"]
        assert "999" in error["message"]
    assert backend.requests == []


async def test_b10_c09_a_used_up_quota_is_429_until_its_reset(
    caller: Caller, bob: User, backend: FakeBackend
) -> None:
    await in_db_thread(tokens_a_day, bob, 60)
    backend.hold(after=0)
    answers = [await caller.chat(max_tokens=50, stream=True) for _ in range(2)]
    refused = next(answer for answer in answers if answer.status != 200)
    error = await check_error(refused, 429, "insufficient_quota")
    assert error["type"] == "insufficient_quota"
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-should-retry"] == "false"
    assert [answer.status for answer in answers].count(200) == 1
    backend.release()


async def test_c09_of_many_requests_at_once_no_more_are_admitted_than_the_quota_holds(
    caller: Caller, bob: User, backend: FakeBackend
) -> None:
    backend.hold(after=0)
    await in_db_thread(tokens_a_day, bob, 100)
    answers = await asyncio.gather(
        *[caller.chat(max_tokens=90, stream=True) for _ in range(12)],
        *[caller.chat("word " * 20, max_tokens=90, stream=True) for _ in range(12)],
    )
    assert len(backend.running) == 1
    backend.release()
    assert [answer.status for answer in answers].count(200) == 1
    assert {answer.status for answer in answers} == {200, 429}
    for answer in answers:
        while await answer.chunk() is not None:
            pass
    assert await bookings_wait(DEADLINE_S) == 0
    status = await in_db_thread(quota_status, bob)
    assert status.reserved_tokens == 0
    assert 0 < status.used_tokens <= 100


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
async def test_c06_no_log_line_holds_a_secret(
    caller: Caller,
    backend: FakeBackend,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    level: int,
) -> None:
    caplog.set_level(level)
    await (await caller.chat("my private words")).json()
    await (await caller.get("/v1/nope")).json()
    await (await Caller("bh_" + "S" * 40).get("/v1/models")).json()

    async def break_down(request: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(backend, "prepare", break_down)
    assert (await caller.chat("my private words")).status == 500
    assert "broken" in caplog.text
    for secret in (caller.secret[7:], "S" * 40, "my private words"):
        assert secret not in caplog.text


async def test_a_quota_that_ends_within_n_choices_admits_none_and_gives_all_back(
    caller: Caller, bob: User, backend: FakeBackend
) -> None:
    await in_db_thread(tokens_a_day, bob, 100)
    await check_error(await caller.chat(n=3, max_tokens=40), 429, "insufficient_quota")
    assert backend.running == {}
    assert await bookings_wait(DEADLINE_S) == 0
    # Nobody was given anything, so the ledger has nothing either.
    assert not await in_db_thread(UsageRecord.objects.exists)
    assert (await caller.chat(max_tokens=40)).status == 200


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (QueueIsFull("Too many wait.", retry_after_s=2.1), 503, "queue_full", "3"),
        (EngineUnavailable("It starts."), 503, "engine_unavailable", "5"),
        (RateLimited("Slower.", retry_after_s=0.2), 429, "rate_limit_exceeded", "1"),
    ],
)
async def test_b10_a_busy_server_says_when_to_come_back(
    caller: Caller,
    backend: FakeBackend,
    monkeypatch: pytest.MonkeyPatch,
    error: ApplianceError,
    status: int,
    code: str,
    retry_after: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def refuse(prepared: object) -> None:
        raise error

    monkeypatch.setattr(backend, "generate", refuse)
    for stream in (False, True):
        answer = await caller.chat(stream=stream)
        await check_error(answer, status, code)
        assert answer.headers["retry-after"] == retry_after
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_while_no_model_is_loaded_chat_is_503_and_the_list_is_empty(
    caller: Caller, backend: FakeBackend
) -> None:
    backend.down = True
    answer = await caller.chat()
    await check_error(answer, 503, "engine_unavailable")
    assert int(answer.headers["retry-after"]) >= 1
    assert (await (await caller.get("/v1/models")).json())["data"] == []


async def test_b06_what_a_chat_template_refuses_is_400_with_its_words(
    caller: Caller, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(request: object) -> None:
        raise BadRequest("Roles must alternate.", param="messages")

    monkeypatch.setattr(backend, "prepare", refuse)
    error = await check_error(await caller.chat(), 400, "invalid_request", param="messages")
    assert error["message"] == "Roles must alternate."


async def test_b05_a_fault_of_ours_is_500_with_generic_words_also_in_debug(
    caller: Caller, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    async def break_down(request: object) -> None:
        raise RuntimeError("secret path /srv/model")

    monkeypatch.setattr(backend, "prepare", break_down)
    for debug in (False, True):
        settings.DEBUG = debug
        error = await check_error(await caller.chat(), 500, "internal_error")
        assert "srv" not in error["message"]
