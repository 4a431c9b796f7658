"""Tools: told to the model, called by it, answered in the history."""

from typing import Any

import orjson
import pytest

from appliance.api.schemas import ToolSpec
from appliance.api.tools import CallReader, ToolCall, tool_messages, tool_plan
from appliance.serving.types import ToolFormat
from tests.appliance.api.asgi_caller import Caller
from tests.appliance.api.checks import CHAT, check_error
from tests.appliance.fake_backend import FakeBackend

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
CALL = '{"name": "get_weather", "arguments": {"city": "Zürich"}}'
WRAPPED = f"<tool_call>\n{CALL}\n</tool_call>"
FORMS: list[tuple[ToolFormat, str]] = [
    ("hermes", WRAPPED),
    ("", WRAPPED),
    ("hermes", f"<tool_call>[{CALL}]</tool_call>"),
    ("hermes", f"<tool_call>{CALL}"),
    ("hermes", f"<tool_call>{CALL[:-1]}\n</tool_call>"),
    ("mistral", f"[{CALL[:-1]}"),
    ("llama3", '{"name": "get_weather", "parameters": {"city": "Zürich"}}'),
    ("llama3", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Zürich"}}'),
    ("mistral", f"[TOOL_CALLS][{CALL}]"),
    ("mistral", f"[{CALL}]"),
    ("mistral", '[{"name": "get_weather", "arguments": "{\\"city\\": \\"Zürich\\"}"}]'),
]


def plan(tool_format: ToolFormat = "hermes", choice: Any = None, **options: Any) -> Any:
    tools = [ToolSpec.model_validate(tool) for tool in (WEATHER, TIME)]
    options = {"is_parallel": True, **options}
    return tool_plan(tools, choice, tool_format=tool_format, **options)


def read(reader: CallReader, text: str, step: int) -> tuple[str, list[ToolCall]]:
    shown, calls = "", []
    for at in range(0, len(text), step):
        new, found = reader.feed(text[at : at + step])
        shown, calls = shown + new, calls + found
    new, found = reader.finish()
    return shown + new, calls + found


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(("tool_format", "text"), FORMS)
def test_a_call_is_read_in_the_models_own_form(
    tool_format: ToolFormat, text: str, step: int
) -> None:
    shown, (call,) = read(CallReader(plan(tool_format)), text, step)
    assert shown == ""
    assert call.name == "get_weather"
    assert orjson.loads(call.arguments) == {"city": "Zürich"}
    assert len(call.id) == 9 if tool_format == "mistral" else call.id.startswith("call_")


@pytest.mark.parametrize("step", [1, 4, 1000])
def test_text_before_calls_is_shown_and_white_space_between_them_is_not(step: int) -> None:
    text = f"Let me see.\n{WRAPPED}\n{WRAPPED}\n"
    shown, calls = read(CallReader(plan()), text, step)
    assert shown == "Let me see."
    assert [call.name for call in calls] == ["get_weather"] * 2
    assert len({call.id for call in calls}) == 2


@pytest.mark.parametrize("step", [1, 4, 1000])
@pytest.mark.parametrize(
    "city", ["</tool_call>", 'a\\</tool_call>\\"', '"</tool_call>"', "<tool_call>"]
)
def test_an_argument_may_hold_the_mark_that_ends_a_call(city: str, step: int) -> None:
    body = orjson.dumps({"name": "get_weather", "arguments": {"city": city}}).decode()
    text = f"<tool_call>{body}</tool_call>{WRAPPED}"
    shown, calls = read(CallReader(plan()), text, step)
    assert shown == ""
    assert [orjson.loads(call.arguments)["city"] for call in calls] == [city, "Zürich"]


@pytest.mark.parametrize("step", [1, 4, 1000])
def test_a_call_behind_one_with_an_open_string_is_read(step: int) -> None:
    broken = '<tool_call>{"name": "get_weather, "arguments": {"city": "Oslo"}}</tool_call>'
    shown, calls = read(CallReader(plan()), broken + WRAPPED, step)
    assert shown == broken
    assert [call.name for call in calls] == ["get_weather"]


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", "a < b and <tool> and <tool_cal"),
        ("hermes", "ends in blanks \n "),
        ("hermes", "<tool_call>no JSON</tool_call> then"),
        ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 5000),
        ("hermes", '<tool_call>{"name": ["get_weather"]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"a": "\\ud800"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"a": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather"'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"a": '),
        ("llama3", '{"answer": 42}'),
        ("llama3", "<|python"),
        ("llama3", " plain text {"),
        ("mistral", "[1] is a footnote"),
        ("mistral", "[TOOL_X"),
    ],
)
def test_what_is_no_call_is_shown_as_it_was_written(
    tool_format: ToolFormat, text: str, step: int
) -> None:
    assert read(CallReader(plan(tool_format)), text, step) == (text, [])


def test_text_is_shown_at_once_as_soon_as_it_cannot_be_a_call() -> None:
    assert CallReader(plan()).feed("Hello <b") == ("Hello <b", [])
    assert CallReader(plan("llama3")).feed("Hello {") == ("Hello {", [])


@pytest.mark.parametrize("tool_format", ["hermes", "llama3", "mistral"])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": WEATHER["function"]}]
)
def test_a_call_that_must_come_is_begun_for_the_model(tool_format: ToolFormat, choice: Any) -> None:
    forced = plan(tool_format, choice)
    rest = (
        '{"city": "Bern"}}'
        if isinstance(choice, dict)
        else ('get_weather", "arguments": {"city": "Bern"}}')
    )
    _, (call,) = read(CallReader(forced), rest + ("]" if tool_format == "mistral" else ""), 2)
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Bern"}')


@pytest.mark.parametrize("step", [1, 1000])
def test_calls_past_the_first_are_dropped_when_they_must_not_be_parallel(step: int) -> None:
    shown, calls = read(CallReader(plan(is_parallel=False)), WRAPPED + WRAPPED, step)
    assert (shown, len(calls)) == ("", 1)


# ---- through the API


async def test_calls_come_whole_with_their_reason(caller: Caller, backend: FakeBackend) -> None:
    backend.words = ["I look", ".\n<tool", "_call>", CALL, "</tool_call>"]
    body = await (await caller.chat(tools=[WEATHER])).json()
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "get_weather"
    assert orjson.loads(call["function"]["arguments"]) == {"city": "Zürich"}
    (request,) = backend.requests
    assert request.tools[0]["function"]["description"] == "The weather of a city."


async def test_a_call_alone_has_null_content(caller: Caller, backend: FakeBackend) -> None:
    backend.words = [WRAPPED]
    body = await (await caller.chat(tools=[WEATHER])).json()
    assert body["choices"][0]["message"]["content"] is None


async def test_calls_are_streamed_as_deltas(caller: Caller, backend: FakeBackend) -> None:
    backend.words = ["So", "<tool_call>", CALL, "</tool_call>", WRAPPED]
    *frames, done = await (await caller.chat(tools=[WEATHER], stream=True, n=2)).events()
    assert done == "[DONE]"
    for index in (0, 1):
        choices = [f["choices"][0] for f in frames if f["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content") or "" for c in choices) == "So"
        calls = [call for c in choices for call in c["delta"].get("tool_calls", [])]
        assert [call["index"] for call in calls] == [0, 1]
        assert all(call["function"]["name"] == "get_weather" for call in calls)
        reasons = [c["finish_reason"] for c in choices]
        assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]


async def test_an_answer_cut_off_within_a_call_says_length(
    caller: Caller, backend: FakeBackend
) -> None:
    backend.words = ["<tool_call>", '{"name": ', "more"]
    body = await (await caller.chat(tools=[WEATHER], max_tokens=2)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["message"]["content"] == '<tool_call>{"name": '


async def test_without_tools_or_with_choice_none_nothing_is_a_call(
    caller: Caller, backend: FakeBackend
) -> None:
    backend.words = [WRAPPED]
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        body = await (await caller.chat(**fields)).json()
        assert body["choices"][0]["message"]["content"] == WRAPPED
        assert body["choices"][0]["finish_reason"] == "stop"
        assert backend.requests[-1].tools == ()


async def test_a_named_function_is_called(caller: Caller, backend: FakeBackend) -> None:
    backend.words = ['{"city": "Bern"}}', "</tool_call>"]
    choice = {"type": "function", "function": {"name": "get_weather"}}
    body = await (await caller.chat(tools=[WEATHER, TIME], tool_choice=choice)).json()
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert backend.requests[0].answer_start.endswith('"get_weather", "arguments": ')
    # Nothing comes behind the call: there the form ends.
    assert backend.requests[0].form is not None
    assert backend.requests[0].form.source[-1] == "}\n</tool_call>"


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "How warm?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_abcdefghijk",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'},
            }
        ],
    },
    {
        "role": "tool",
        "tool_call_id": "call_abcdefghijk",
        "content": [{"type": "text", "text": "42"}],
    },
    {"role": "user", "content": "Thanks."},
]


async def test_b03_calls_and_their_answers_reach_the_template(
    caller: Caller, backend: FakeBackend
) -> None:
    answer = await caller.post(CHAT, {"model": "scripted", "messages": HISTORY, "tools": [WEATHER]})
    assert (await answer.ended()).status == 200
    messages = backend.requests[0].messages
    assert messages is not None
    assert messages[1]["content"] == ""
    assert messages[1]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert messages[2] == {
        "role": "tool",
        "content": "42",
        "tool_call_id": "call_abcdefghijk",
        "name": "get_weather",
    }


def test_b03_a_model_without_tools_in_its_template_is_told_in_words() -> None:
    messages = [{**message, "content": message["content"] or ""} for message in HISTORY]
    messages[2]["content"] = "42"
    written = tool_messages(messages, plan(""))
    assert [message["role"] for message in written] == [
        "system",
        "user",
        "assistant",
        "user",
        "user",
    ]
    assert '"get_weather"' in written[0]["content"]
    assert written[2]["content"].startswith('<tool_call>{"name": "get_weather"')
    assert written[3]["content"] == "<tool_response>\n42\n</tool_response>"
    assert all(set(message) == {"role", "content"} for message in written)
    assert not any("None" in message["content"] for message in written)


def test_ids_are_nine_letters_where_the_template_wants_that() -> None:
    messages = [{**message, "content": message["content"] or ""} for message in HISTORY]
    named = tool_messages(messages, plan("mistral"))
    assert named[1]["tool_calls"][0]["id"] == named[2]["tool_call_id"] == "cdefghijk"


async def test_calls_whose_arguments_are_missing_are_400(caller: Caller) -> None:
    broken = [HISTORY[0], {**HISTORY[1], "tool_calls": [{"id": "a", "function": {"name": "x"}}]}]
    answer = await caller.post(CHAT, {"model": "scripted", "messages": broken})
    where = "messages[1].tool_calls[0].function.arguments"
    await check_error(answer, 400, "invalid_request", param=where)
