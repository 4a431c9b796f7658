"""What is left of the quota, in headers; and /v1/tokenize, which costs nothing of it."""

import asyncio
from typing import Any

import orjson
import pytest
from django.utils import timezone

from appliance.accounts.models import User
from appliance.api import sse
from appliance.quotas.rules import limit_rule_save
from appliance.quotas.selectors import quota_status
from appliance.serving import turns
from appliance.serving.booking import bookings_wait, in_db_thread
from tests.appliance.api.asgi_caller import DEADLINE_S, Caller
from tests.appliance.fake_backend import FakeBackend
from tests.appliance.limits import only_limit, tokens_a_day


async def test_b10_headers_tell_what_is_left_and_agree_with_the_refusal(
    caller: Caller, bob: User
) -> None:
    await in_db_thread(tokens_a_day, bob, 100)
    first = await caller.chat(max_tokens=5)
    await first.json()
    assert await bookings_wait(DEADLINE_S) == 0
    second = await caller.chat("word " * 200)
    await second.json()
    assert (first.status, second.status) == (200, 429)
    for answer in (first, second):
        assert answer.headers["x-ratelimit-limit-tokens"] == "100"
    assert second.headers["x-ratelimit-remaining-tokens"] == str(100 - 11)
    assert 0 < int(second.headers["x-ratelimit-reset-tokens"].removesuffix("s")) <= 25 * 3600


async def test_b10_requests_a_minute_are_told_refused_and_named(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = timezone.now().replace(second=20, microsecond=0)
    monkeypatch.setattr(timezone, "now", lambda: now)
    await in_db_thread(only_limit, "requests_per_minute", 2)
    answers = [await (await caller.chat(max_tokens=5)).ended() for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    told = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
    assert told == ["1", "0", "0"]
    for answer in answers:
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["x-ratelimit-reset-requests"] == "40s"
        assert "x-ratelimit-limit-tokens" not in answer.headers
    assert 40 <= int(answers[2].headers["retry-after"]) <= 42
    assert "x-should-retry" not in answers[2].headers
    error = orjson.loads(answers[2].body)["error"]
    assert error["code"] == "rate_limit_exceeded"
    assert "2 requests a minute (rule for everybody)" in error["message"]


async def test_b10_too_many_at_a_time_are_told_when_to_come_back(
    caller: Caller, backend: FakeBackend
) -> None:
    await in_db_thread(only_limit, "concurrent_requests", 1)
    backend.hold(after=0)
    first = await caller.chat(stream=True)
    second = await caller.chat()
    assert (first.status, second.status) == (200, 429)
    assert int(second.headers["retry-after"]) >= 1
    assert (await second.json())["error"]["code"] == "rate_limit_exceeded"
    backend.release()
    await first.ended()


# ---- where the rule waits

DIALECTS = {
    "/v1/chat/completions": {},
    "/v1/responses": {"input": "Hi", "messages": None},
    "/v1/messages": {"max_tokens": 9},
    "/api/chat": {},
}


@pytest.mark.parametrize("path", DIALECTS)
async def test_b14_who_stands_in_line_sees_the_place_and_then_the_answer(
    caller: Caller, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.02)
    await in_db_thread(only_limit, "concurrent_requests", 1, wait_s=60)
    backend.hold(after=0)
    first = await caller.chat(stream=True)
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": "scripted", "stream": True, "messages": messages, **DIALECTS[path]}
    answers = [await caller.post(path, body) for _ in range(2)]
    for ahead, answer in enumerate(answers):
        for _ in range(3):
            said = await answer.chunk() or b""
            if path == "/api/chat":
                assert b'"content":""},"done":false' in said
            else:
                assert said == b": waiting, %d ahead\n\n" % ahead
    backend.release()
    await first.ended()
    for answer in answers:
        await answer.ended()
        assert answer.status == 200
        assert b"Paris" in answer.body
    # The second moved up before it was served.
    assert path == "/api/chat" or b": waiting, 0 ahead" in answers[1].body


async def test_who_waited_in_vain_is_told_in_the_stream(
    caller: Caller, backend: FakeBackend
) -> None:
    await in_db_thread(only_limit, "concurrent_requests", 1, wait_s=1)
    backend.hold(after=0)
    await caller.chat(stream=True)
    answer = await caller.chat(stream=True)
    *places, last = await answer.events()
    assert places == [": waiting, 0 ahead"]
    assert last["error"]["code"] == "rate_limit_exceeded"
    assert "waited 1 s" in last["error"]["message"]
    whole = await caller.chat()
    assert whole.status == 429
    assert int(whole.headers["retry-after"]) >= 1


async def test_a_client_that_leaves_the_line_gives_its_place_up(
    caller: Caller, backend: FakeBackend
) -> None:
    await in_db_thread(only_limit, "concurrent_requests", 1, wait_s=60)
    backend.hold(after=0)
    first = await caller.chat(stream=True)
    waiting = await caller.chat(stream=True)
    assert await waiting.event() == ": waiting, 0 ahead"
    await waiting.leave()
    async with asyncio.timeout(DEADLINE_S):
        while turns._lines:
            await asyncio.sleep(0.01)
    backend.release()
    await first.ended()
    assert len(backend.requests) == 1


async def test_of_several_limits_on_tokens_the_tightest_is_told(caller: Caller) -> None:
    await in_db_thread(only_limit, "tokens_per_day", 1000)
    await in_db_thread(lambda: limit_rule_save("tokens_per_month", 900, by=None))
    answer = await caller.chat(max_tokens=5)
    await answer.json()
    assert answer.headers["x-ratelimit-limit-tokens"] == "900"


async def test_without_a_limit_there_are_no_such_headers(caller: Caller, bob: User) -> None:
    await in_db_thread(tokens_a_day, bob, None)
    answer = await caller.chat()
    await answer.json()
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


async def test_tokenize_counts_a_text_or_messages_and_costs_nothing(
    caller: Caller, bob: User, backend: FakeBackend
) -> None:
    messages = [{"role": "user", "content": "one two three"}]
    for body in ({"prompt": "one two three"}, {"messages": messages, "model": "scripted"}):
        answer = await caller.post("/v1/tokenize", body)
        assert await answer.json() == {"count": 3, "max_model_len": 1000, "tokens": [0, 1, 2]}
    assert backend.requests == []
    status = await in_db_thread(quota_status, bob)
    assert (status.used_tokens, status.reserved_tokens) == (0, 0)


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, {"prompt": 5}]
)
async def test_tokenize_needs_one_of_text_and_messages(
    caller: Caller, body: dict[str, Any]
) -> None:
    answer = await caller.post("/v1/tokenize", body)
    assert (answer.status, (await answer.json())["error"]["param"]) == (400, "prompt")
