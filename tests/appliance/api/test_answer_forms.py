"""What every dialect says of an answer's form reaches the engine; calls that must come do come."""

import json
import random
from typing import Any

import pytest

from appliance.api.call_form import call_pieces, call_start
from appliance.api.schemas import ToolSpec
from appliance.api.tools import CallReader, tool_plan
from appliance.serving.engine_words import constraint_of
from appliance.serving.types import AnswerForm, ToolFormat
from inference.request import FinishReason
from tests.appliance.api.asgi_caller import Caller
from tests.appliance.api.checks import CHAT, GOOD, MESSAGES
from tests.appliance.fake_backend import FakeBackend
from tests.inference.structured import make_request, run_all, text_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
RESPONSES = {"model": "scripted", "input": "Hi"}
LLAMA = {"model": "scripted", "messages": MESSAGES, "stream": False}
CLAUDE = {"model": "scripted", "max_tokens": 50, "messages": MESSAGES}
JSON_FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}


def chat_format(**fields: Any) -> dict[str, Any]:
    named = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, **fields}}
    return {"response_format": named}


@pytest.mark.parametrize(
    ("path", "body", "form"),
    [
        (CHAT, {**GOOD, "response_format": {"type": "text"}}, None),
        (
            CHAT,
            {**GOOD, "response_format": {"type": "json_object"}},
            AnswerForm(kind="json_object"),
        ),
        (
            CHAT,
            {**GOOD, **chat_format(schema=SCHEMA)},
            AnswerForm(kind="json_schema", source=SCHEMA),
        ),
        (
            CHAT,
            {**GOOD, "structured_outputs": {"regex": "[a-z]"}},
            AnswerForm(kind="regex", source="[a-z]", param="structured_outputs"),
        ),
        (
            CHAT,
            {**GOOD, "structured_outputs": {"choice": ["yes", "no"]}},
            AnswerForm(kind="pieces", source={"one_of": ["yes", "no"]}, param="structured_outputs"),
        ),
        (
            "/v1/completions",
            {"model": "scripted", "prompt": "Hi", "structured_outputs": {"json": SCHEMA}},
            AnswerForm(kind="json_schema", source=SCHEMA, param="structured_outputs"),
        ),
        (
            "/v1/completions",
            {"model": "scripted", "prompt": "Hi", "structured_outputs": {"grammar": "start: X"}},
            AnswerForm(kind="lark", source="start: X", param="structured_outputs"),
        ),
        (
            "/v1/responses",
            {**RESPONSES, "text": {"format": JSON_FORMAT}},
            AnswerForm(kind="json_schema", source=SCHEMA, param="text.format"),
        ),
        (
            "/v1/responses",
            {**RESPONSES, "text": {"format": {"type": "json_object"}}},
            AnswerForm(kind="json_object", param="text.format"),
        ),
        (
            "/v1/messages",
            {**CLAUDE, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            AnswerForm(kind="json_schema", source=SCHEMA, param="output_config.format"),
        ),
        ("/v1/messages", {**CLAUDE, "output_config": {"effort": "low"}}, None),
        ("/api/chat", {**LLAMA, "format": "json"}, AnswerForm(kind="json_object", param="format")),
        (
            "/api/chat",
            {**LLAMA, "format": SCHEMA},
            AnswerForm(kind="json_schema", source=SCHEMA, param="format"),
        ),
        (
            "/api/generate",
            {"model": "scripted", "prompt": "Hi", "stream": False, "format": SCHEMA},
            AnswerForm(kind="json_schema", source=SCHEMA, param="format"),
        ),
    ],
)
async def test_the_form_of_an_answer_reaches_the_engine(
    caller: Caller, backend: FakeBackend, path: str, body: dict[str, Any], form: AnswerForm | None
) -> None:
    answer = await (await caller.post(path, body)).ended()
    assert answer.status == 200
    assert backend.requests[0].form == form


@pytest.mark.parametrize(
    "asked", [{"type": "json_object"}, {"type": "json_schema"}, {"schema": SCHEMA}, "json"]
)
async def test_a_format_of_claude_that_is_none_is_named(
    caller: Caller, backend: FakeBackend, asked: Any
) -> None:
    answer = await caller.post("/v1/messages", {**CLAUDE, "output_config": {"format": asked}})
    error = (await answer.json())["error"]
    assert (answer.status, error["type"]) == (400, "invalid_request_error")
    assert "output_config.format" in error["message"]
    assert backend.requests == []


async def test_a_response_says_what_format_it_has(caller: Caller, backend: FakeBackend) -> None:
    answer = await caller.post("/v1/responses", {**RESPONSES, "text": {"format": JSON_FORMAT}})
    assert (await answer.json())["text"] == {"format": JSON_FORMAT}


async def test_claude_begins_an_answer_with_a_last_message(
    caller: Caller, backend: FakeBackend
) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    body = {"model": "scripted", "max_tokens": 5, "messages": messages}
    assert (await (await caller.post("/v1/messages", body)).ended()).status == 200
    assert backend.requests[0].continue_final_message


async def test_a_last_message_is_continued_on_demand(caller: Caller, backend: FakeBackend) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    for fields in ({}, {"add_generation_prompt": False}):
        answer = await caller.chat(messages=begun, continue_final_message=True, **fields)
        assert (await answer.ended()).status == 200
        assert backend.requests[-1].continue_final_message
    assert (await (await caller.chat(messages=begun)).ended()).status == 200
    assert not backend.requests[-1].continue_final_message
    assert backend.requests[-1].add_generation_prompt


# ---- calls, written by a model that knows nothing

TOOLS = [ToolSpec.model_validate(tool) for tool in (WEATHER, TIME)]
CHOICES = [NAMED, "required"]


@pytest.mark.parametrize("tool_format", ["hermes", "llama3", "mistral", ""])
@pytest.mark.parametrize("choice", CHOICES, ids=["named", "required"])
@pytest.mark.parametrize("is_parallel", [True, False])
def test_a_call_that_must_come_comes_from_any_model(
    tool_format: ToolFormat, choice: Any, is_parallel: bool
) -> None:
    plan = tool_plan(TOOLS, choice, is_parallel=is_parallel, tool_format=tool_format)
    assert plan.form is not None
    constraint = constraint_of(plan.form)
    requests = [
        make_request(f"r{seed}", seed=seed, max_tokens=2000, constraint=constraint)
        for seed in range(2)
    ]
    run_all(requests, num_blocks=512, check=False)
    for request in requests:
        assert request.finish_reason is FinishReason.STOP
        reader = CallReader(plan)
        text = text_of(request)
        shown, calls, at = "", [], 0
        while at < len(text):
            step = random.Random(at).randint(1, 7)
            more, found = reader.feed(text[at : at + step])
            shown, at = shown + more, at + step
            calls += found
        more, found = reader.finish()
        calls += found
        assert (shown + more, bool(calls)) == ("", True), text
        if not is_parallel or choice is NAMED:
            assert len(calls) == 1
        for call in calls:
            arguments = json.loads(call.arguments)
            if call.name == "get_time":
                assert arguments == {}
            else:
                assert isinstance(arguments["city"], str)
                assert arguments.keys() <= {"city", "days"}


def test_an_answer_of_a_form_may_be_a_call_instead() -> None:
    plan = tool_plan(TOOLS, "auto", is_parallel=False, tool_format="hermes")
    calls = [
        call_start("hermes", ""),
        *call_pieces("hermes", plan.tools, name="", is_parallel=False),
    ]
    form = AnswerForm(kind="pieces", source={"one_of": [{"schema": SCHEMA}, calls]})
    request = make_request("r", constraint=constraint_of(form))
    run_all([request])
    assert text_of(request).startswith(("{", "<tool_call>\n{"))


async def test_tools_and_a_form_are_both_offered(caller: Caller, backend: FakeBackend) -> None:
    await (await caller.chat(tools=[WEATHER, TIME], **chat_format(schema=SCHEMA))).ended()
    form = backend.requests[0].form
    assert form is not None
    text, calls = form.source["one_of"]
    assert text == {"schema": SCHEMA}
    assert calls[0].startswith("<tool_call>")
    assert backend.requests[0].answer_start == ""
