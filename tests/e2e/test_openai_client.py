"""Scripts talk to the real server with the official client, as the README shows."""

import httpx
import openai
import pytest

from tests.e2e.server import Server

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(server: Server, api_key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=api_key, max_retries=0)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_the_capital_of_france(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_and_whole_answers_are_the_same(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=6
    )
    text, reasons, usage = "", [], None
    for chunk in client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if choice.finish_reason:
                reasons.append(choice.finish_reason)
    assert text == whole.choices[0].message.content
    assert reasons == ["length"] == [whole.choices[0].finish_reason]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 6


def test_errors_are_those_the_client_knows(
    server: Server, client: openai.OpenAI, model: str
) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="bh_wrong", max_retries=0).models.list()
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as hot:
        client.chat.completions.create(model=model, messages=QUESTION, temperature=9)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "word " * 20_000}]
        )
    assert long.value.code == "context_length_exceeded"


def test_a_client_that_leaves_frees_its_slot(server: Server, api_key: str, model: str) -> None:
    headers = {"Authorization": f"Bearer {api_key}"}
    body = {"model": model, "messages": QUESTION, "stream": True, "ignore_eos": True}
    with (
        httpx.Client(base_url=server.url, headers=headers, timeout=60) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        assert response.status_code == 200
        assert next(response.iter_lines()).startswith("data:")
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as http:
        for _ in range(600):
            engine = http.get("/api/engine").json()
            if engine["running"] == 0:
                break
        assert engine["running"] == 0
        assert engine["kv"]["blocks_used"] == 0


def test_slots_by_script(server: Server, api_key: str) -> None:
    headers = {"Authorization": f"Bearer {api_key}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as http:
        changed = http.patch("/api/engine", json={"slots": 5})
        assert changed.status_code == 200
        assert changed.json()["slots"]["requested"] == 5
        refused = http.patch("/api/engine", json={"slots": 0})
        assert refused.status_code == 400
        assert "slots" in refused.json()["error"]["message"]
        assert http.get("/api/engine").json()["slots"]["requested"] == 5
