"""Tools and begun answers through the real tokenizer, template and engine."""

import asyncio
import json

import pytest

from appliance.errors import BadRequest, ContextLengthExceeded
from appliance.serving.engine_backend import EngineBackend
from appliance.serving.tool_format import tool_format_of
from appliance.serving.types import Caller, GenerationRequest
from inference.text.tokenizer import Tokenizer
from inference.weights.gguf_tokenizer import build_tokenizer
from tests.inference.helpers import FakeRunner
from tests.inference.text_models import byte_level_metadata

# In the manner of Qwen's.
TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}<|im_start|>assistant
"""
TOOL = {"type": "function", "function": {"name": "get_time", "description": "d", "parameters": {}}}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_time", "arguments": '{"zone": "UTC"}'},
}
MESSAGES = [
    {"role": "user", "content": "What time is it?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "name": "get_time", "content": "42"},
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    document, config = build_tokenizer(byte_level_metadata())
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
async def engine(model_dir, until_loaded):
    backend = EngineBackend(
        lambda report: model_dir, lambda config: FakeRunner(max_model_len=900), config={}
    )
    backend.start()
    await until_loaded(backend)
    yield backend
    await backend.stop(0.0)


@pytest.fixture
def until_loaded():
    async def until(backend):
        async with asyncio.timeout(30):
            while backend.model is None:
                assert backend.state()["error"] is None
                await asyncio.sleep(0.005)

    return until


def request(**fields):
    caller = Caller(user_id=1, username="bob", source="api")
    return GenerationRequest(caller=caller, messages=MESSAGES, **fields)


async def test_b03_the_prompt_holds_tools_calls_and_answers_and_no_none(engine, model_dir):
    assert engine.model.tool_format == "hermes"
    prepared = await engine.prepare(request(tools=(TOOL,)))
    text = Tokenizer.from_dir(model_dir).decode(prepared.token_ids, show_special=True)
    assert '"get_time", "description": "d"' in text
    assert '"name": "get_time", "arguments": {"zone": "UTC"}' in text
    assert "<tool_response>42</tool_response>" in text
    for wrong in ("None", "null", "[{"):
        assert wrong not in text


async def test_an_answer_can_be_begun_and_its_tokens_are_counted(engine):
    plain = await engine.prepare(request())
    begun = await engine.prepare(request(answer_start='<tool_call>\n{"name": "'))
    start = list(begun.token_ids[plain.prompt_tokens :])
    assert list(begun.token_ids[: plain.prompt_tokens]) == list(plain.token_ids)
    assert await engine.detokenize(start) == '<tool_call>\n{"name": "'
    assert begun.max_completion_tokens == plain.max_completion_tokens - len(start)
    with pytest.raises(ContextLengthExceeded):
        await engine.prepare(request(answer_start="x " * 900))


async def test_a_token_that_does_not_exist_has_no_text(engine):
    with pytest.raises(BadRequest, match="no token"):
        await engine.detokenize([10**6])


@pytest.mark.parametrize(
    ("template", "tool_format"),
    [
        (TEMPLATE, "hermes"),
        ("{{ messages }}", ""),
        ("{% if tools %}{{ tools }}{% endif %}", ""),
        ("{% if tools %}<tool_call><function=name>{% endif %}", ""),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
        ('{% if tools %}{"name": n, "parameters": d}{% endif %}', "llama3"),
    ],
)
def test_the_form_of_calls_is_told_from_the_template(template, tool_format):
    assert tool_format_of(template) == tool_format
