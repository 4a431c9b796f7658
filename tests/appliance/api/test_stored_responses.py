"""Responses that are kept: gone on from, read, deleted, and never another user's."""

from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError
from django.utils import timezone

from appliance.accounts.models import User
from appliance.accounts.services import user_create
from appliance.api import stored_responses
from appliance.api.models import StoredResponse
from appliance.api.tasks import expire_responses
from appliance.api_keys.services import api_key_issue
from tests.appliance.api.asgi_caller import Caller
from tests.appliance.api.checks import check_error
from tests.appliance.fake_backend import FakeBackend

PATH = "/v1/responses"
TEXT = "Paris is the capital."


async def ask(caller: Caller, text: Any = "Hello", **fields: Any) -> dict[str, Any]:
    answer = await caller.post(PATH, {"model": "scripted", "input": text, **fields})
    body: dict[str, Any] = await answer.json()
    assert answer.status == 200, body
    return body


async def delete(caller: Caller, response_id: str) -> Any:
    return await caller.send("DELETE", f"{PATH}/{response_id}").start()


@pytest.fixture
def charlie(committed_db: None, backend: FakeBackend) -> Caller:
    return Caller(api_key_issue(user_create("charlie"), "tests")[1])


async def test_a_response_goes_on_from_the_one_before(caller: Caller, backend: FakeBackend) -> None:
    first = await ask(caller, "Name a capital.", instructions="Be brief.")
    second = await ask(caller, "Of which country?", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    await ask(caller, [{"role": "user", "content": "Sure?"}], previous_response_id=second["id"])
    # Instructions hold for one response, as OpenAI has it.
    assert [(each["role"], each["content"]) for each in backend.requests[2].messages or []] == [
        ("user", "Name a capital."),
        ("assistant", TEXT),
        ("user", "Of which country?"),
        ("assistant", TEXT),
        ("user", "Sure?"),
    ]


async def test_a_call_and_its_result_go_on_across_responses(
    caller: Caller, backend: FakeBackend
) -> None:
    tool = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
    backend.words = ['<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>']
    first = await ask(caller, "Warm?", tools=[tool])
    call_id = first["output"][-1]["call_id"]
    result = {"type": "function_call_output", "call_id": call_id, "output": "21"}
    await ask(caller, [result], tools=[tool], previous_response_id=first["id"])
    messages = backend.requests[1].messages or []
    assert [each["role"] for each in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["id"] == call_id


async def test_a_streamed_response_is_kept_before_its_last_event(caller: Caller) -> None:
    answer = await caller.post(PATH, {"model": "scripted", "input": "Hello", "stream": True})
    text = (await answer.ended()).body.decode()
    assert "event: response.completed" in text
    stored = await sync_to_async(StoredResponse.objects.get)()
    assert f'"id":"{stored.id}"' in text.rpartition("event: response.completed")[2]
    again = await (await caller.get(f"{PATH}/{stored.id}")).json()
    assert again["output"][0]["content"][0]["text"] == TEXT


async def test_a_response_and_its_input_can_be_read_and_deleted(caller: Caller) -> None:
    said = [{"role": "user", "content": f"{number}"} for number in range(3)]
    made = await ask(caller, said)
    assert await (await caller.get(f"{PATH}/{made['id']}")).json() == made

    path = f"{PATH}/{made['id']}/input_items"
    page = await (await caller.get(path, query=b"limit=2&order=asc")).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["0", "1"]
    assert page["has_more"] is True
    after = f"after={page['last_id']}&order=asc".encode()
    rest = await (await caller.get(path, query=after)).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2"]
    assert rest["has_more"] is False
    newest = (await (await caller.get(path)).json())["data"][0]
    assert newest["content"] == [{"type": "input_text", "text": "2"}]

    gone = await (await delete(caller, made["id"])).json()
    assert gone == {"id": made["id"], "object": "response", "deleted": True}
    await check_error(await caller.get(f"{PATH}/{made['id']}"), 404, "not_found")
    await check_error(await delete(caller, made["id"]), 404, "not_found")


async def test_what_is_not_to_be_stored_is_not(caller: Caller) -> None:
    made = await ask(caller, store=False)
    assert made["store"] is False
    await check_error(await caller.get(f"{PATH}/{made['id']}"), 404, "not_found")


async def test_a_broken_response_is_not_kept(caller: Caller, backend: FakeBackend) -> None:
    backend.fail_after = 2
    answer = await caller.post(PATH, {"model": "scripted", "input": "a", "stream": True})
    assert b"response.failed" in (await answer.ended()).body
    assert not await sync_to_async(StoredResponse.objects.exists)()


async def test_c04_another_users_response_is_the_same_as_none(
    caller: Caller, charlie: Caller, backend: FakeBackend
) -> None:
    made = await ask(caller, "secret")
    for path in (f"{PATH}/{made['id']}", f"{PATH}/{made['id']}/input_items"):
        await check_error(await charlie.get(path), 404, "not_found")
    await check_error(await delete(charlie, made["id"]), 404, "not_found")
    body = {"model": "scripted", "input": "x", "previous_response_id": made["id"]}
    answer = await charlie.post(PATH, body)
    await check_error(answer, 400, "invalid_request", param="previous_response_id")
    assert len(backend.requests) == 1
    assert (await (await caller.get(f"{PATH}/{made['id']}")).json())["id"] == made["id"]


@pytest.mark.parametrize("query", [b"limit=0", b"limit=x", b"limit=101", b"order=up", b"after=x"])
async def test_a_wrong_page_is_refused(caller: Caller, query: bytes) -> None:
    made = await ask(caller)
    answer = await caller.get(f"{PATH}/{made['id']}/input_items", query=query)
    await check_error(answer, 400, "invalid_request", param=query.decode().partition("=")[0])


@pytest.mark.parametrize("response_id", ["resp_1", "a\0b", "x" * 3000, "ä"])
async def test_an_unknown_response_is_404_and_not_gone_on_from(
    caller: Caller, response_id: str
) -> None:
    await check_error(await caller.get(f"{PATH}/{response_id}"), 404, "not_found")
    body = {"model": "scripted", "input": "x", "previous_response_id": response_id}
    answer = await caller.post(PATH, body)
    await check_error(answer, 400, "invalid_request", param="previous_response_id")


async def test_a_conversation_whose_middle_was_deleted_is_refused(
    caller: Caller, backend: FakeBackend
) -> None:
    first = await ask(caller)
    second = await ask(caller, previous_response_id=first["id"])
    await delete(caller, first["id"])
    body = {"model": "scripted", "input": "x", "previous_response_id": second["id"]}
    answer = await caller.post(PATH, body)
    await check_error(answer, 400, "invalid_request", param="previous_response_id")
    assert len(backend.requests) == 2


async def test_the_oldest_go_when_there_are_too_many(
    caller: Caller, charlie: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = await ask(charlie)
    monkeypatch.setattr(stored_responses, "MAX_RESPONSES", 2)
    made = [await ask(caller) for _ in range(3)]
    await check_error(await caller.get(f"{PATH}/{made[0]['id']}"), 404, "not_found")
    for kept_by, kept in ((caller, made[1]), (caller, made[2]), (charlie, theirs)):
        assert (await (await kept_by.get(f"{PATH}/{kept['id']}")).json())["id"] == kept["id"]
    monkeypatch.setattr(stored_responses, "MAX_BYTES", 1)
    newest = await ask(caller)
    assert (await (await caller.get(f"{PATH}/{newest['id']}")).json())["id"] == newest["id"]
    await check_error(await caller.get(f"{PATH}/{made[2]['id']}"), 404, "not_found")


async def test_what_is_past_its_time_is_gone_also_before_it_is_deleted(
    caller: Caller, bob: User
) -> None:
    made, kept = await ask(caller), await ask(caller)
    old = timezone.now() - timedelta(days=stored_responses.KEPT_DAYS, seconds=1)
    await StoredResponse.objects.filter(id=made["id"]).aupdate(created_at=old)
    await check_error(await caller.get(f"{PATH}/{made['id']}"), 404, "not_found")
    await sync_to_async(expire_responses)()
    assert [each.id async for each in StoredResponse.objects.all()] == [kept["id"]]


async def test_an_answer_that_the_database_does_not_take_is_given_all_the_same(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**fields: Any) -> None:
        raise OperationalError("database or disk is full")

    monkeypatch.setattr(StoredResponse.objects, "create", full)
    made = await ask(caller)
    assert (made["store"], made["output"][0]["content"][0]["text"]) == (False, TEXT)
