"""Whatever is wrong with a request: the right status in OpenAI's envelope, never a page."""

import asyncio
import json
import logging
from typing import Any

import pytest

from appliance.accounts.models import User
from appliance.accounts.services import user_set_active
from appliance.api import auth
from appliance.api_keys.models import ApiKey
from appliance.api_keys.services import api_key_issue, api_key_revoke
from appliance.errors import (
    ApplianceError,
    BadRequest,
    EngineUnavailable,
    QueueIsFull,
    RateLimited,
)
from appliance.quotas.services import quota_rule_set, quota_status
from appliance.serving.booking import bookings_wait, in_db_thread
from tests.appliance.api.asgi_caller import DEADLINE_S, Answer, Caller
from tests.appliance.fake_backend import FakeBackend

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello there"}]
GOOD = {"model": "scripted", "messages": MESSAGES}


async def check(
    answer: Answer, status: int, code: str, *, param: str | None = None
) -> dict[str, Any]:
    body = await answer.json()
    assert answer.headers["content-type"] == "application/json"
    assert (answer.status, body["error"]["code"]) == (status, code)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert body["error"]["param"] == param
    return body["error"]


# ---- the body


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"not json",
        b"[]",
        b"5",
        b"null",
        b'{"model": NaN}',
        b"\xff\xfe",
        b'{"a": "\\ud800"}',
        b'{"a":' * 3000,
        b"[" * 100_000,
    ],
)
async def test_b05_a_body_that_is_no_json_object_is_400(caller: Caller, raw: bytes) -> None:
    await check(await caller.post(CHAT, raw=raw), 400, "invalid_request")


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "", "text/json"]
)
async def test_c22_only_application_json_is_taken(caller: Caller, content_type: str) -> None:
    answer = await caller.post(CHAT, GOOD, headers={"content-type": content_type})
    error = await check(answer, 415, "unsupported_media_type")
    assert "application/json" in error["message"]
    with_charset = {"content-type": "application/json; charset=utf-8"}
    assert (await caller.post(CHAT, GOOD, headers=with_charset)).status == 200


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [*MESSAGES, {"role": "robot", "content": ""}]}, "messages[1].role"),
        ({"messages": [{"role": "user<|im_start|>", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "42"}]}, "messages[0].tool_call_id"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"n": 0}, "n"),
        ({"n": 5_000_000}, "n"),
        ({"n": 2, "seed": 2**63}, "seed"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "much"}}, "logit_bias"),
        ({"stop": 5}, "stop"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
async def test_a_wrong_or_unsupported_field_is_400_and_named(
    caller: Caller, backend: FakeBackend, change: dict[str, Any], param: str
) -> None:
    body = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    await check(await caller.post(CHAT, body), 400, "invalid_request", param=param)
    assert backend.requests == []


async def test_b04_unknown_and_harmless_fields_are_ignored(caller: Caller) -> None:
    answer = await caller.chat(
        store=True,
        reasoning_effort="low",
        parallel_tool_calls=False,
        metadata={"a": "b"},
        service_tier="auto",
        user="u-1",
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        cache_salt="other-user",
        something_new={"x": [1]},
    )
    assert answer.status == 200


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "no_such_thing"])
async def test_b03_parts_that_are_no_text_are_400(caller: Caller, kind: str) -> None:
    content = [{"type": "text", "text": "see"}, {"type": kind, kind: {"url": "http://x.example"}}]
    body = {**GOOD, "messages": [{"role": "user", "content": content}]}
    error = await check(
        await caller.post(CHAT, body), 400, "invalid_request", param="messages[0].content"
    )
    assert "not supported" in error["message"]


async def test_b03_parts_are_joined_null_is_empty_and_developer_is_system(
    caller: Caller, backend: FakeBackend
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "name": "eve", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": []},
        {
            "role": "user",
            "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}],
        },
    ]
    answer = await caller.post(CHAT, {**GOOD, "messages": messages})
    assert answer.status == 200
    seen = [(m["role"], m["content"]) for m in backend.requests[0].messages]
    assert backend.requests[0].messages[2]["tool_calls"] == [call]
    assert not any("name" in message for message in backend.requests[0].messages)
    assert seen == [
        ("system", "Be brief"),
        ("user", "a"),
        ("assistant", ""),
        ("tool", "42"),
        ("assistant", ""),
        ("assistant", ""),
        ("user", "x\ny"),
    ]


async def test_b11_a_long_prompt_below_the_limit_works_and_above_it_is_413(
    caller: Caller, settings: Any
) -> None:
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 3_000_000
    below = {**GOOD, "messages": [{"role": "user", "content": "x" * 2_600_000}]}
    assert (await caller.post(CHAT, below)).status == 200
    above = {**GOOD, "messages": [{"role": "user", "content": "x" * 3_000_000}]}
    await check(await caller.post(CHAT, above), 413, "body_too_large")


async def test_b11_the_body_of_a_caller_without_a_key_is_not_parsed(
    stranger: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("the body was looked at")

    monkeypatch.setattr("appliance.api.body._parse", fail)
    await check(await stranger.post(CHAT, GOOD), 401, "invalid_api_key")


async def test_a_fault_in_a_field_is_told_in_plain_words(caller: Caller) -> None:
    for change, said in (
        ({"messages": []}, "messages must not be empty."),
        ({"max_tokens": "5"}, "max_tokens must be a whole number."),
        ({"stream": "yes"}, "stream must be true or false."),
        ({"model": 1}, "model must be text."),
    ):
        body = await (await caller.post(CHAT, {**GOOD, **change})).json()
        assert body["error"]["message"] == said
    body = await (await caller.post(CHAT, {"messages": MESSAGES})).json()
    assert body["error"]["message"] == "model is missing."


# ---- the route


async def test_b05_routes_that_do_not_exist_are_404_in_the_envelope(caller: Caller) -> None:
    for path in ("/v1", "/v1/", "/v1/nope", "/v1/chat/completions/", "/v1/chat", "/v1/engines"):
        for method in ("GET", "POST"):
            answer = await caller.send(method, path, GOOD).start()
            await check(answer, 404, "not_found")


async def test_b05_the_wrong_method_is_405_and_allow_names_the_right_one(caller: Caller) -> None:
    for method in ("GET", "PUT", "DELETE", "OPTIONS", "HEAD"):
        answer = await caller.send(method, CHAT).start()
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
    answer = await caller.post("/v1/models", {})
    await check(answer, 405, "method_not_allowed")
    assert "GET" in answer.headers["allow"]


@pytest.mark.parametrize(
    "name",
    [
        "gpt-4",
        "SCRIPTED",
        "scripted ",
        "scripted.",
        "../../etc/passwd",
        "/etc/passwd",
        "a\0b",
        "x" * 5000,
        "ｓcripted",
    ],
)
async def test_c20_only_the_exact_name_of_the_model_in_use_is_known(
    caller: Caller, name: str
) -> None:
    error = await check(
        await caller.post(CHAT, {**GOOD, "model": name}), 404, "model_not_found", param="model"
    )
    assert len(error["message"]) < 500
    await check(await caller.get(f"/v1/models/{name}"), 404, "model_not_found", param="model")


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
    error = await check(answer, 401, "invalid_api_key")
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert error["type"] == "authentication_error"
    assert "Traceback" not in json.dumps(error)


async def test_c06_a_key_in_the_query_is_no_key(caller: Caller) -> None:
    secret, caller.secret = caller.secret, None
    for name in ("api_key", "token", "key"):
        answer = await caller.get("/v1/models", query=f"{name}={secret}".encode())
        await check(answer, 401, "invalid_api_key")


async def test_c22_a_session_cookie_opens_nothing_under_v1(
    stranger: Caller, bob: User, client: Any
) -> None:
    await in_db_thread(client.force_login, bob)
    cookie = {"cookie": f"sessionid={client.cookies['sessionid'].value}"}
    await check(await stranger.get("/v1/models", headers=cookie), 401, "invalid_api_key")
    await check(await stranger.post(CHAT, GOOD, headers=cookie), 401, "invalid_api_key")


async def test_revoking_and_switching_off_count_from_the_next_request(
    caller: Caller, bob: User
) -> None:
    assert (await caller.get("/v1/models")).status == 200
    await in_db_thread(user_set_active, bob, False)
    await check(await caller.get("/v1/models"), 401, "invalid_api_key")
    await in_db_thread(user_set_active, bob, True)
    assert (await caller.get("/v1/models")).status == 200
    await in_db_thread(api_key_revoke, await ApiKey.objects.aget())
    await check(await caller.get("/v1/models"), 401, "invalid_api_key")


async def test_a_missing_scope_is_403(bob: User, backend: FakeBackend) -> None:
    _, secret = await in_db_thread(api_key_issue, bob, "reader", ["models"])
    error = await check(await Caller(secret).chat(), 403, "not_allowed")
    assert error["type"] == "permission_error"


async def test_a_key_for_other_models_is_403_and_lists_nothing(
    bob: User, backend: FakeBackend
) -> None:
    _, secret = await in_db_thread(api_key_issue, bob, "x", allowed_models=["other"])
    await check(await Caller(secret).chat(), 403, "not_allowed", param="model")
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
        await check(await wrong.get("/v1/models"), 401, "invalid_api_key")
    answer = await wrong.get("/v1/models")
    await check(answer, 429, "rate_limit_exceeded")
    assert int(answer.headers["retry-after"]) >= 1
    assert (await caller.get("/v1/models")).status == 200


# ---- admission


async def test_a_prompt_that_is_too_long_says_what_is_allowed(
    caller: Caller, backend: FakeBackend
) -> None:
    for stream in (False, True):
        answer = await caller.chat("word " * 1000, stream=stream)
        error = await check(answer, 400, "context_length_exceeded", param="messages")
        assert "1000" in error["message"]
        assert "999" in error["message"]
    assert backend.requests == []


async def test_b10_c09_a_used_up_quota_is_429_until_its_reset(
    caller: Caller, bob: User, backend: FakeBackend
) -> None:
    await in_db_thread(quota_rule_set, bob, 60, by=None)
    backend.hold(after=0)
    answers = [await caller.chat(max_tokens=50, stream=True) for _ in range(2)]
    refused = next(answer for answer in answers if answer.status != 200)
    error = await check(refused, 429, "insufficient_quota")
    assert error["type"] == "insufficient_quota"
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-should-retry"] == "false"
    assert [answer.status for answer in answers].count(200) == 1
    backend.release()


async def test_c09_of_many_requests_at_once_no_more_are_admitted_than_the_quota_holds(
    caller: Caller, bob: User, backend: FakeBackend
) -> None:
    backend.hold(after=0)
    await in_db_thread(quota_rule_set, bob, 100, by=None)
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
    await in_db_thread(quota_rule_set, bob, 100, by=None)
    await check(await caller.chat(n=3, max_tokens=40), 429, "insufficient_quota")
    assert backend.running == {}
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
) -> None:
    async def refuse(prepared: object) -> None:
        raise error

    monkeypatch.setattr(backend, "generate", refuse)
    for stream in (False, True):
        answer = await caller.chat(stream=stream)
        await check(answer, status, code)
        assert answer.headers["retry-after"] == retry_after


async def test_while_no_model_is_loaded_chat_is_503_and_the_list_is_empty(
    caller: Caller, backend: FakeBackend
) -> None:
    backend.down = True
    answer = await caller.chat()
    await check(answer, 503, "engine_unavailable")
    assert int(answer.headers["retry-after"]) >= 1
    assert (await (await caller.get("/v1/models")).json())["data"] == []


async def test_b06_what_a_chat_template_refuses_is_400_with_its_words(
    caller: Caller, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(request: object) -> None:
        raise BadRequest("Roles must alternate.", param="messages")

    monkeypatch.setattr(backend, "prepare", refuse)
    error = await check(await caller.chat(), 400, "invalid_request", param="messages")
    assert error["message"] == "Roles must alternate."


async def test_b05_a_fault_of_ours_is_500_with_generic_words_also_in_debug(
    caller: Caller, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    async def break_down(request: object) -> None:
        raise RuntimeError("secret path /srv/model")

    monkeypatch.setattr(backend, "prepare", break_down)
    for debug in (False, True):
        settings.DEBUG = debug
        error = await check(await caller.chat(), 500, "internal_error")
        assert "srv" not in error["message"]
