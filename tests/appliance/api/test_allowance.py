"""What is left of the quota, in headers; and /v1/tokenize, which costs nothing of it."""

from typing import Any

import pytest

from appliance.accounts.models import User
from appliance.quotas.services import quota_rule_set, quota_status
from appliance.serving.booking import bookings_wait, in_db_thread
from tests.appliance.api.asgi_caller import DEADLINE_S, Caller
from tests.appliance.fake_backend import FakeBackend


async def test_b10_headers_tell_what_is_left_and_agree_with_the_refusal(
    caller: Caller, bob: User
) -> None:
    await in_db_thread(quota_rule_set, bob, 100, by=None)
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


async def test_without_a_limit_there_are_no_such_headers(caller: Caller, bob: User) -> None:
    await in_db_thread(quota_rule_set, bob, None, by=None)
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
