"""Anthropic's, Ollama's and OpenAI's own clients against the real server, over a socket."""

from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest

TEXT = "Paris is the capital."
ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
CALL: list[Any] = [{"role": "user", "content": "call"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "w", "parameters": PARAMETERS},
}
CLAUDE_TOOL: Any = {"name": "get_weather", "description": "w", "input_schema": PARAMETERS}


# ---- Anthropic


@pytest.fixture
def claude(server: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=server.key, max_retries=0) as client:
        yield client


def test_claude_a_whole_message(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(
        model="scripted", max_tokens=50, system="Be brief.", messages=ASK
    )
    assert message.content[0].text == TEXT
    assert (message.role, message.stop_reason, message.stop_sequence) == (
        "assistant",
        "end_turn",
        None,
    )
    assert (message.usage.input_tokens, message.usage.output_tokens) == (8, 5)


def test_claude_a_streamed_message(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(model="scripted", max_tokens=50, messages=ASK) as stream:
        assert "".join(stream.text_stream) == TEXT
        message = stream.get_final_message()
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == 5


def test_claude_takes_a_schema_and_names_a_bad_one(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "scripted", "max_tokens": 50, "messages": ASK}
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    assert claude.messages.create(**asked, output_config=config).content[0].text == TEXT
    config = {"format": {"type": "yaml"}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
        claude.messages.create(**asked, output_config=config)


def test_claude_limits_and_stop_sequences_are_named(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(model="scripted", max_tokens=2, messages=ASK)
    assert (message.content[0].text, message.stop_reason) == ("Paris is", "max_tokens")
    message = claude.messages.create(
        model="scripted", max_tokens=50, messages=ASK, stop_sequences=["."]
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", ".")


def test_claude_tools_whole_and_streamed(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": "scripted",
        "max_tokens": 50,
        "messages": CALL,
        "tools": [CLAUDE_TOOL],
    }
    with claude.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (claude.messages.create(**asked), streamed):
        text, call = message.content
        assert (text.text, call.name, call.input) == ("I look.", "get_weather", {"city": "Bern"})
        assert message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": streamed.content[1].id, "content": "21 degrees"}
    history = [
        *CALL,
        {"role": "assistant", "content": streamed.content},
        {"role": "user", "content": [result]},
    ]
    answer = claude.messages.create(**{**asked, "messages": history})
    assert answer.content[0].text == TEXT


def test_claude_tokens_are_counted(claude: anthropic.Anthropic) -> None:
    counted = claude.messages.count_tokens(model="scripted", messages=ASK, system="Be brief.")
    assert counted.input_tokens == 8


def test_claude_errors_have_its_envelope(claude: anthropic.Anthropic, server: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(model="other", max_tokens=5, messages=ASK)
    assert missing.value.body["error"]["type"] == "not_found_error"
    image = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match="reads text only"):
        claude.messages.create(
            model="scripted", max_tokens=5, messages=[{"role": "user", "content": [image]}]
        )
    with (
        anthropic.Anthropic(base_url=server.url, api_key="bh_wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError) as refused,
    ):
        stranger.messages.create(model="scripted", max_tokens=5, messages=ASK)
    assert refused.value.body["error"]["type"] == "authentication_error"
    with (
        pytest.raises(anthropic.APIStatusError, match="stopped working"),
        claude.messages.stream(
            model="scripted", max_tokens=50, messages=[{"role": "user", "content": "fail"}]
        ) as stream,
    ):
        stream.until_done()


def test_claude_a_bearer_key_is_taken_too(server: Any) -> None:
    with anthropic.Anthropic(base_url=server.url, auth_token=server.key, api_key=None) as client:
        assert client.messages.create(model="scripted", max_tokens=5, messages=ASK).content


# ---- Ollama


@pytest.fixture
def llama(server: Any) -> Iterator[ollama.Client]:
    client = ollama.Client(server.url, headers={"Authorization": f"Bearer {server.key}"})
    yield client
    client._client.close()


def test_ollama_chat_whole_and_streamed(llama: ollama.Client) -> None:
    whole = llama.chat("scripted:latest", messages=ASK, options={"num_ctx": 4096})
    assert (whole.message.content, whole.done, whole.done_reason) == (TEXT, True, "stop")
    assert (whole.prompt_eval_count, whole.eval_count) == (6, 5)
    *parts, last = llama.chat("scripted", messages=ASK, stream=True, options={"num_predict": 3})
    assert "".join(part.message.content for part in parts) == "Paris is the"
    assert not any(part.done for part in parts)
    assert (last.done, last.done_reason, last.eval_count) == (True, "length", 3)


def test_ollama_generate_whole_streamed_and_raw(llama: ollama.Client) -> None:
    whole = llama.generate("scripted", "What is it?", system="Be brief.")
    assert (whole.response, whole.prompt_eval_count) == (TEXT, 5)
    parts = list(llama.generate("scripted", "What is it?", raw=True, stream=True))
    assert "".join(part.response for part in parts) == TEXT
    assert parts[-1].done
    assert llama.generate("scripted", "").done_reason == "load"


def test_ollama_tools(llama: ollama.Client) -> None:
    answer = llama.chat("scripted", messages=CALL, tools=[TOOL])
    [call] = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Bern"})
    history = [*CALL, answer.message, {"role": "tool", "content": "21", "tool_name": "get_weather"}]
    assert llama.chat("scripted", messages=history, tools=[TOOL]).message.content == TEXT


def test_ollama_models(llama: ollama.Client) -> None:
    assert [model.model for model in llama.list().models] == ["scripted"]
    assert [model.name for model in llama.ps().models] == ["scripted"]
    assert llama.show("scripted").modelinfo["general.context_length"] == 1000


def test_ollama_errors_are_read_by_its_client(llama: ollama.Client, server: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="no model 'other'") as missing:
        llama.chat("other", messages=ASK)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="stopped working"):
        list(llama.chat("scripted", messages=[{"role": "user", "content": "fail"}], stream=True))
    with pytest.raises(ollama.ResponseError, match="embeddings"):
        llama.embed("scripted", "text")
    stranger = ollama.Client(server.url)
    with pytest.raises(ollama.ResponseError, match="API key is needed") as refused:
        stranger.chat("scripted", messages=ASK)
    assert refused.value.status_code == 401
    stranger._client.close()


# ---- OpenAI


@pytest.fixture
def gpt(server: Any) -> Iterator[openai.OpenAI]:
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key=server.key, max_retries=0) as client:
        yield client


def test_openai_tools_streamed(gpt: openai.OpenAI) -> None:
    with gpt.chat.completions.stream(
        model="scripted",
        messages=CALL,
        tools=[TOOL],  # type: ignore[list-item]
    ) as stream:
        stream.until_done()
        choice = stream.get_final_completion().choices[0]
    [call] = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Bern"}')
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")


def test_openai_embeddings_b18(gpt: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no embeddings"):
        gpt.embeddings.create(model="scripted", input="a")


def test_openai_responses_whole_and_streamed(gpt: openai.OpenAI) -> None:
    whole = gpt.responses.create(model="scripted", input="What is it?", instructions="Be brief.")
    assert (whole.output_text, whole.status) == (TEXT, "completed")
    with gpt.responses.stream(model="scripted", input="What is it?") as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text == TEXT
    assert final.usage is not None
    assert final.usage.output_tokens == 5


def test_openai_responses_with_tools(gpt: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **TOOL["function"], "strict": False}
    answer = gpt.responses.create(model="scripted", input="call", tools=[tool])
    text, call = answer.output
    assert (answer.output_text, call.type) == ("I look.", "function_call")
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Bern"}')
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    history = [{"role": "user", "content": "call"}, text, call, output]
    assert gpt.responses.create(model="scripted", input=history).output_text == TEXT


def test_openai_responses_that_are_kept(gpt: openai.OpenAI) -> None:
    first = gpt.responses.create(model="scripted", input="What is it?")
    with gpt.responses.stream(
        model="scripted", input="Sure?", previous_response_id=first.id
    ) as stream:
        second = stream.until_done().get_final_response()
    assert second.previous_response_id == first.id
    assert gpt.responses.retrieve(second.id).output_text == TEXT
    [item] = list(gpt.responses.input_items.list(second.id))
    assert (item.type, item.content[0].text) == ("message", "Sure?")
    gpt.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(second.id)
