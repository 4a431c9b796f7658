"""Answers in a form that was asked for, over the real server with the official client (A23)."""

import json
import time
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from tests.e2e.server import Server

ASK = [{"role": "user", "content": "Paris is the capital of France. Describe it as JSON."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class City(pydantic.BaseModel):
    # Or an answer might add properties of its own for ever.
    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(max_length=30)
    country: Literal["France", "Germany"]
    population: int = pydantic.Field(ge=0, le=99)


@pytest.fixture(scope="module")
def client(server: Server, api_key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=api_key, max_retries=0)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_a_pydantic_model_comes_back_whole_and_streamed(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "messages": ASK, "temperature": 0, "response_format": City}
    answer = client.chat.completions.parse(**asked)
    city = answer.choices[0].message.parsed
    assert isinstance(city, City)
    assert answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert streamed == city


def test_several_hot_answers_of_one_prompt_are_all_json(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model, messages=ASK, temperature=1.2, n=2, response_format=City
    )
    assert all(isinstance(choice.message.parsed, City) for choice in answer.choices)


def test_a_cut_answer_says_length_a23(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=ASK, max_tokens=5, response_format={"type": "json_object"}
    )
    assert answer.choices[0].finish_reason == "length"
    assert (answer.choices[0].message.content or "").startswith("{")


def test_responses_have_a_form_too(client: openai.OpenAI, model: str) -> None:
    answer = client.responses.parse(model=model, input=ASK, text_format=City, temperature=0)
    assert isinstance(answer.output_parsed, City)


def test_a_function_that_must_be_called_is_called(client: openai.OpenAI, model: str) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        asked: Any = {"model": model, "messages": ASK, "tools": [WEATHER], "tool_choice": choice}
        answer = client.chat.completions.create(**asked, temperature=1.3)
        assert answer.choices[0].finish_reason == "tool_calls"
        [call] = answer.choices[0].message.tool_calls or []
        assert list(json.loads(call.function.arguments)) == ["city"]  # type: ignore[union-attr]
        chunks = [
            chunk.choices[0]
            for chunk in client.chat.completions.create(**asked, temperature=0, stream=True)
            if chunk.choices
        ]
        assert chunks[-1].finish_reason == "tool_calls"


BAD: list[dict[str, Any]] = [
    {"type": "object", "properties": {"foo": "bar"}},
    {"type": "string", "pattern": "(?<=x)*"},
    {"type": "string", "pattern": "(" * 2000},
    {"$ref": "#"},
    {"type": "yaml"},
]


def test_a_bad_schema_is_refused_at_once_and_harms_nobody_a23(
    client: openai.OpenAI, model: str
) -> None:
    neighbour = client.chat.completions.create(
        model=model, messages=ASK, max_tokens=60, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(neighbour))
    for schema in BAD:
        form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        started = time.monotonic()
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=model, messages=ASK, response_format=form)
        assert time.monotonic() - started < 5.0, "a second on a machine with nothing else to do"
        assert refused.value.param == "response_format"
        assert "response_format" in refused.value.message
    reasons = [chunk.choices[0].finish_reason for chunk in neighbour if chunk.choices]
    assert reasons[-1] == "length"


NESTED = "((a{1,50}){1,50}){1,50}"
FORMS: dict[str, dict[str, Any]] = {
    "expression": {"extra_body": {"structured_outputs": {"regex": NESTED}}},
    "grammar": {"extra_body": {"structured_outputs": {"grammar": f"start: A\nA: /{NESTED}/"}}},
    "pattern": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "n",
                "schema": {
                    "type": "object",
                    "properties": {
                        "text": {"type": "string"},
                        "code": {"type": "string", "pattern": f"^{NESTED}$"},
                    },
                    "required": ["text", "code"],
                    "additionalProperties": False,
                },
            },
        }
    },
}


@pytest.mark.parametrize("name", FORMS)
def test_nested_repetition_is_refused_when_it_is_sent_a23(
    client: openai.OpenAI, model: str, name: str
) -> None:
    asked: Any = {"model": model, "messages": ASK, "max_tokens": 200, **FORMS[name]}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**asked, stream=stream)
        assert refused.value.code == "invalid_request"
        assert "too many ways" in refused.value.message


def test_what_shows_only_late_to_cost_too_much_is_no_fault_of_the_server_a23(
    client: openai.OpenAI, model: str
) -> None:
    """An answer of many times "aaaa": behind 500 letters their repetition costs more each time."""
    late = {"structured_outputs": {"regex": "a{600}(b|(a{1,500}){1,500})"}}
    asked: Any = {
        "model": model,
        "messages": ASK,
        "temperature": 0,
        "max_tokens": 600,
        "logit_bias": {"46880": 100},
        "extra_body": late,
    }
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**asked)
    assert refused.value.code == "invalid_request"
    assert "too many ways" in refused.value.message
    with pytest.raises(openai.APIError) as broken:
        list(client.chat.completions.create(**asked, stream=True))
    assert broken.value.code == "invalid_request"
    short = {**asked, "logit_bias": {"65": 100}, "max_tokens": 20}
    answer = client.chat.completions.create(**short)
    assert answer.choices[0].finish_reason == "length"


def test_ollama_takes_a_schema(server: Server, api_key: str, model: str) -> None:
    body = {"model": model, "messages": ASK, "stream": False, "format": City.model_json_schema()}
    headers = {"Authorization": f"Bearer {api_key}"}
    answer = httpx.post(f"{server.url}/api/chat", json=body, headers=headers, timeout=60)
    City.model_validate_json(answer.json()["message"]["content"])


def test_claude_takes_a_schema(server: Server, api_key: str, model: str) -> None:
    asked = {"format": {"type": "json_schema", "schema": City.model_json_schema()}}
    body = {"model": model, "messages": ASK, "max_tokens": 200, "output_config": asked}
    headers = {"x-api-key": api_key}
    answer = httpx.post(f"{server.url}/v1/messages", json=body, headers=headers, timeout=60)
    City.model_validate_json(answer.json()["content"][0]["text"])


def test_an_answer_that_is_begun_goes_on(client: openai.OpenAI, model: str) -> None:
    question: Any = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    answer = client.chat.completions.create(
        model=model, messages=question, temperature=0, max_tokens=8, extra_body=extra
    )
    assert (answer.choices[0].message.content or "").startswith(" Paris")
