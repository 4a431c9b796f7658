"""/v1/responses: whole, streamed, refused. What is kept of them: test_stored_responses."""

from typing import Any

import orjson
import pytest

from tests.appliance.api.asgi_caller import Caller
from tests.appliance.api.checks import check_error
from tests.appliance.fake_backend import FakeBackend

PATH = "/v1/responses"
GOOD = {"model": "scripted", "input": "Hello there"}
TEXT = "Paris is the capital."
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern"}}</tool_call>'


async def events(caller: Caller, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await (await caller.post(PATH, {**body, "stream": True})).ended()
    found = []
    for frame in answer.body.decode().strip().split("\n\n"):
        name, data = frame.split("\n")
        found.append(orjson.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def test_a_whole_response(caller: Caller, backend: FakeBackend) -> None:
    body = await (
        await caller.post(PATH, {**GOOD, "instructions": "Be brief.", "metadata": {"a": "b"}})
    ).json()
    assert (body["object"], body["status"], body["store"]) == ("response", "completed", True)
    [item] = body["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", TEXT)
    assert body["usage"]["total_tokens"] == 9
    assert body["metadata"] == {"a": "b"}
    assert backend.requests[0].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello there"},
    ]


async def test_a_response_cut_off_says_so(caller: Caller) -> None:
    body = await (await caller.post(PATH, {**GOOD, "max_output_tokens": 2})).json()
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    last = (await events(caller, {**GOOD, "max_output_tokens": 2}))[-1]
    assert last["type"] == "response.incomplete"


async def test_events_of_text_and_calls_come_in_their_order(
    caller: Caller, backend: FakeBackend
) -> None:
    backend.words = ["I look.", CALL]
    found = await events(caller, {**GOOD, "tools": [TOOL]})
    names = [event["type"].removeprefix("response.") for event in found]
    assert names == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    text, call = found[-1]["response"]["output"]
    assert text["content"][0]["text"] == "I look."
    assert (call["type"], call["name"]) == ("function_call", "get_weather")
    assert orjson.loads(call["arguments"]) == {"city": "Bern"}
    indexes = [event["output_index"] for event in found if "output_index" in event]
    assert indexes == [0] * 6 + [1] * 4


async def test_b08_a_failure_in_the_stream_is_a_failed_response(
    caller: Caller, backend: FakeBackend
) -> None:
    backend.fail_after = 2
    found = await events(caller, GOOD)
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["error"]["code"] == "generation_failed"
    assert "response.completed" not in [event["type"] for event in found]


async def test_b03_items_become_messages(caller: Caller, backend: FakeBackend) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Warm?"}]},
        {"type": "reasoning", "summary": []},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look."}],
        },
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "21"},
        {"type": "function_call_output", "call_id": "c2", "output": "22"},
    ]
    answer = await caller.post(PATH, {**GOOD, "input": items, "tools": [TOOL]})
    assert (await answer.ended()).status == 200
    messages = backend.requests[0].messages or []
    assert [message["role"] for message in messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
    ]
    assert [call["id"] for call in messages[2]["tool_calls"]] == ["c1", "c2"]
    assert messages[4]["content"] == "22"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "file_search_call"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input[0].name"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "b"}}, "tool_choice"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
async def test_what_is_wrong_or_not_supported_is_400_and_named(
    caller: Caller, backend: FakeBackend, change: dict[str, Any], param: str
) -> None:
    answer = await caller.post(PATH, {**GOOD, **change})
    await check_error(answer, 400, "invalid_request", param=param)
    assert backend.requests == []
