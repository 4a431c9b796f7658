"""One ledger row a generation, through whatever door it came, and none for what was refused."""

from typing import Any

import pytest

from appliance.accounts.models import User
from appliance.api_keys.services import api_key_issue
from appliance.quotas.models import UsageRecord
from appliance.serving.booking import bookings_wait, in_db_thread
from tests.appliance.api.asgi_caller import DEADLINE_S, Caller
from tests.appliance.fake_backend import FakeBackend

SAID = [{"role": "user", "content": "one two three"}]
DOORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID},
    "/v1/completions": {"prompt": "one two three"},
    "/v1/responses": {"input": "one two three"},
    "/v1/messages": {"messages": SAID, "max_tokens": 100},
    "/api/chat": {"messages": SAID},
    "/api/generate": {"prompt": "one two three", "raw": True},
}


async def rows() -> list[UsageRecord]:
    assert await bookings_wait(DEADLINE_S) == 0
    return await in_db_thread(list, UsageRecord.objects.order_by("pk"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", DOORS)
async def test_each_door_writes_one_row_with_the_true_counts(
    caller: Caller, bob: User, path: str, stream: bool
) -> None:
    answer = await caller.post(path, {"model": "scripted", "stream": stream, **DOORS[path]})
    assert answer.status == 200
    await answer.ended()
    [row] = await rows()
    assert (row.username, row.user_id, row.source, row.model) == ("bob", bob.pk, "api", "scripted")
    assert (row.prompt_tokens, row.completion_tokens, row.end) == (3, 5, "stop")
    assert row.key_prefix == caller.secret[:7]


async def test_each_choice_has_its_row(caller: Caller) -> None:
    await (await caller.chat("one two three", n=3)).ended()
    assert [row.completion_tokens for row in await rows()] == [5, 5, 5]


async def test_the_capacity_test_has_its_rows_too(bob: User, backend: FakeBackend) -> None:
    _, secret = await in_db_thread(
        api_key_issue, bob, "capacity", source="capacity", generation_class="background"
    )
    await (await Caller(secret).chat("one two three")).ended()
    [row] = await rows()
    assert (row.source, row.prompt_tokens, row.completion_tokens) == ("capacity", 3, 5)


async def test_what_is_refused_at_the_door_leaves_none(caller: Caller) -> None:
    for body in ({"model": "none", "messages": SAID}, {"model": "scripted", "messages": []}):
        assert (await caller.post("/v1/chat/completions", body)).status >= 400
    assert (await caller.chat("word " * 1000)).status == 400
    assert await rows() == []
