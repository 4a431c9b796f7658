"""Whatever is wrong with body or route: the right status in OpenAI's envelope, never a page."""

from typing import Any

import pytest

from tests.appliance.api.asgi_caller import Caller
from tests.appliance.api.checks import CHAT, GOOD, MESSAGES, check_error
from tests.appliance.fake_backend import FakeBackend

# A23: deep schemas must not reach the template.
NESTED: dict[str, Any] = {}
for _ in range(200):
    NESTED = {"properties": NESTED}


BEGUN = [*MESSAGES, {"role": "assistant", "content": "It is"}]
_CALL = {"id": "c", "type": "function", "function": {"name": "a", "arguments": "{}"}}
CALLING = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [_CALL]}]


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {}}}


def choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


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
    await check_error(await caller.post(CHAT, raw=raw), 400, "invalid_request")


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "", "text/json"]
)
async def test_c22_only_application_json_is_taken(caller: Caller, content_type: str) -> None:
    answer = await caller.post(CHAT, GOOD, headers={"content-type": content_type})
    error = await check_error(answer, 415, "unsupported_media_type")
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
        ({"n": 2, "seed": 2**63 - 1}, "seed"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "much"}}, "logit_bias"),
        ({"stop": 5}, "stop"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "browser", "function": {"name": "a"}}]}, "tools[0].type"),
        ({"tools": [tool("two words")]}, "tools[0].function.name"),
        ({"tools": [tool("a"), tool("a")]}, "tools"),
        ({"tools": [tool("a", NESTED)]}, "tools[0].function.parameters"),
        ({"tools": [tool("a")] * 129}, "tools"),
        ({"tools": [tool("a")], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [tool("a")], "tool_choice": choice("b")}, "tool_choice"),
        ({"tools": [tool("a")], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format",
        ),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "messages": CALLING}, "continue_final_message"),
        (
            {"continue_final_message": True, "add_generation_prompt": True, "messages": BEGUN},
            "add_generation_prompt",
        ),
        (
            {
                "continue_final_message": True,
                "messages": BEGUN,
                "tools": [tool("a")],
                "tool_choice": "required",
            },
            "tool_choice",
        ),
    ],
)
async def test_a_wrong_or_unsupported_field_is_400_and_named(
    caller: Caller, backend: FakeBackend, change: dict[str, Any], param: str
) -> None:
    body = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    await check_error(await caller.post(CHAT, body), 400, "invalid_request", param=param)
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
    error = await check_error(
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
    names = [message.get("name") for message in backend.requests[0].messages]
    # The caller's own names are no part of it; the function of an answered call is.
    assert [name for name in names if name] == ["f"]
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
    await check_error(await caller.post(CHAT, above), 413, "body_too_large")


async def test_b11_the_body_of_a_caller_without_a_key_is_not_parsed(
    stranger: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("the body was looked at")

    monkeypatch.setattr("appliance.api.body._parse", fail)
    await check_error(await stranger.post(CHAT, GOOD), 401, "invalid_api_key")


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
            await check_error(answer, 404, "not_found")


async def test_b05_the_wrong_method_is_405_and_allow_names_the_right_one(caller: Caller) -> None:
    for method in ("GET", "PUT", "DELETE", "OPTIONS", "HEAD"):
        answer = await caller.send(method, CHAT).start()
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
    answer = await caller.post("/v1/models", {})
    await check_error(answer, 405, "method_not_allowed")
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
    error = await check_error(
        await caller.post(CHAT, {**GOOD, "model": name}), 404, "model_not_found", param="model"
    )
    assert len(error["message"]) < 500
    await check_error(await caller.get(f"/v1/models/{name}"), 404, "model_not_found", param="model")


@pytest.mark.parametrize("path", ["/api/nope", "/api/", "/api", "/api/nope/", "/api/engine/x"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_b05_an_unknown_address_under_api_is_no_page(
    caller: Caller, method: str, path: str
) -> None:
    answer = await caller.send(method, path).start()
    body = await answer.json()
    assert (answer.status, answer.headers["content-type"]) == (404, "application/json")
    assert "nothing at" in str(body["error"])
