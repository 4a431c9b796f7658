"""Anthropic's and Ollama's dialects: what their official clients do not show."""

import json
from typing import Any

import orjson
import pytest

from appliance.api import sse
from appliance.quotas.models import UsageRecord
from appliance.serving.booking import bookings_wait, in_db_thread
from tests.appliance.api.asgi_caller import DEADLINE_S, Caller
from tests.appliance.fake_backend import FakeBackend
from tests.appliance.limits import tokens_a_day

MESSAGES = "/v1/messages"
USER: dict[str, Any] = {"role": "user", "content": "Hello there"}
CLAUDE = {"model": "scripted", "max_tokens": 50, "messages": [USER]}
LLAMA = {"model": "scripted", "messages": [USER]}


def with_content(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {**CLAUDE, "messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("change", "status", "kind"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"messages": []}, 400, "invalid_request_error"),
        ({"messages": [{"role": "system", "content": "x"}]}, 400, "invalid_request_error"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error"),
        ({"temperature": "hot"}, 400, "invalid_request_error"),
        ({"model": "other"}, 404, "not_found_error"),
    ],
)
async def test_claude_faults_have_its_envelope(
    caller: Caller, backend: FakeBackend, change: dict[str, Any], status: int, kind: str
) -> None:
    body = {name: value for name, value in {**CLAUDE, **change}.items() if value is not None}
    answer = await caller.post(MESSAGES, body)
    error = await answer.json()
    assert (answer.status, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert set(error["error"]) == {"type", "message"}
    assert backend.requests == []


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:6379/"}},
        {"type": "document", "source": {}},
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]},
        {"type": "text"},
    ],
)
async def test_c19_blocks_that_are_no_text_are_refused_by_place(
    caller: Caller, backend: FakeBackend, block: dict[str, Any]
) -> None:
    answer = await caller.post(MESSAGES, with_content(block))
    error = await answer.json()
    assert answer.status == 400
    assert "messages[0].content" in error["error"]["message"]
    assert backend.requests == []


async def test_claude_events_come_in_their_order(caller: Caller) -> None:
    answer = await caller.post(MESSAGES, {**CLAUDE, "stream": True})
    await answer.ended()
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = [frame.split("\n") for frame in answer.body.decode().strip().split("\n\n")]
    names = [frame[0].removeprefix("event: ") for frame in frames]
    data = [orjson.loads(frame[1].removeprefix("data: ")) for frame in frames]
    assert [each["type"] for each in data] == names
    inner = [name for name in names if name != "content_block_delta"]
    assert inner == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert data[0]["message"]["usage"]["input_tokens"] == 2


async def test_b08_a_failure_in_a_claude_stream_is_an_error_event_and_no_end(
    caller: Caller, backend: FakeBackend
) -> None:
    backend.fail_after = 2
    answer = await (await caller.post(MESSAGES, {**CLAUDE, "stream": True})).ended()
    last = answer.body.decode().strip().split("\n\n")[-1]
    assert last.startswith("event: error\ndata: ")
    assert b"message_stop" not in answer.body


async def test_b08_a_failure_in_an_ollama_stream_is_a_line_with_error(
    caller: Caller, backend: FakeBackend
) -> None:
    backend.fail_after = 2
    answer = await (await caller.post("/api/chat", LLAMA)).ended()
    assert answer.headers["content-type"] == "application/x-ndjson"
    *lines, last = [orjson.loads(line) for line in answer.body.splitlines()]
    assert set(last) == {"error"}
    assert not any(line["done"] for line in lines)


async def test_b14_ollama_lines_keep_a_silent_connection_open(
    caller: Caller, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.02)
    backend.hold(after=0)
    answer = await caller.post("/api/chat", LLAMA)
    sent = b""
    while not sent:
        sent = await answer.chunk() or b""
    line = orjson.loads(sent)
    assert (line["message"]["content"], line["done"]) == ("", False)
    backend.release()
    await answer.ended()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/chat"),
        ("POST", "/api/generate"),
        ("GET", "/api/tags"),
        ("POST", "/api/show"),
        ("GET", "/api/ps"),
        ("GET", "/api/version"),
        ("POST", "/api/embed"),
    ],
)
async def test_c08_ollama_paths_need_a_key(stranger: Caller, method: str, path: str) -> None:
    answer = await stranger.send(method, path, LLAMA).start()
    error = await answer.json()
    assert answer.status == 401
    assert isinstance(error["error"], str)
    assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({**LLAMA, "format": "yaml"}, "format"),
        ({**LLAMA, "format": 3}, "format"),
        ({**LLAMA, "options": {"temperature": "hot"}}, "temperature"),
        ({**LLAMA, "options": {"num_predict": 0}}, "max_tokens"),
        ({**LLAMA, "messages": [{**USER, "images": ["aGk="]}]}, "images"),
        ({"model": 5}, "model"),
    ],
)
async def test_ollama_faults_are_named(caller: Caller, body: dict[str, Any], word: str) -> None:
    answer = await caller.post("/api/chat", body)
    error = await answer.json()
    assert answer.status == 400
    assert word in error["error"]


async def test_paths_that_do_nothing_here_say_so_in_ollamas_words(caller: Caller) -> None:
    pull = await caller.post("/api/pull", {"model": "x"})
    wrong_method = await caller.get("/api/chat")
    for answer, status in ((pull, 404), (wrong_method, 405)):
        error = await answer.json()
        assert (answer.status, isinstance(error["error"], str)) == (status, True)
    assert wrong_method.headers["allow"] == "POST"


async def test_the_version_is_that_of_the_product(caller: Caller) -> None:
    version = (await (await caller.get("/api/version")).json())["version"]
    assert version.count(".") == 2


@pytest.mark.parametrize(("path", "body"), [(MESSAGES, CLAUDE), ("/api/chat", LLAMA)])
async def test_every_dialect_is_paid_from_the_same_quota(
    caller: Caller, bob: Any, path: str, body: dict[str, Any]
) -> None:
    answer = await (await caller.post(path, body)).ended()
    assert answer.status == 200
    assert await bookings_wait(DEADLINE_S) == 0
    record = await in_db_thread(UsageRecord.objects.get)
    assert (record.username, record.completion_tokens, record.end) == ("bob", 5, "stop")
    await in_db_thread(lambda: tokens_a_day(bob, 20))
    refused = await (await caller.post(path, body)).ended()
    assert refused.status == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-ratelimit-remaining-tokens"] == "13"


async def test_x_api_key_counts_only_where_anthropics_clients_send_it(
    caller: Caller, stranger: Caller
) -> None:
    headers: dict[str, str | bytes] = {"x-api-key": str(caller.secret)}
    taken = await (await stranger.post(MESSAGES, CLAUDE, headers=headers)).ended()
    refused = await (await stranger.post("/v1/chat/completions", LLAMA, headers=headers)).ended()
    assert (taken.status, refused.status) == (200, 401)


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize("levels", [40, 300, 900])
@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens", "/api/chat"])
async def test_deeply_nested_arguments_of_a_call_are_refused(
    caller: Caller, backend: FakeBackend, path: str, levels: int
) -> None:
    if path == "/api/chat":
        call = {"function": {"name": "f", "arguments": nested(levels)}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        body = {**LLAMA, "messages": [USER, said, USER]}
    else:
        use = {"type": "tool_use", "id": "t", "name": "f", "input": nested(levels)}
        body = {**CLAUDE, "messages": [USER, {"role": "assistant", "content": [use]}, USER]}
    answer = await caller.post(path, raw=json.dumps(body).encode())
    assert answer.status == 400
    assert backend.requests == []
