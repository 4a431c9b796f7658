"""No body, however odd, is answered with 500; in every dialect."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.api.body import body_check
from appliance.api.messages import MessagesBody
from appliance.api.messages import chat_body as messages_chat
from appliance.api.ollama import OllamaChatBody, OllamaGenerateBody, generate_body
from appliance.api.ollama import chat_body as ollama_chat
from appliance.api.responses import ResponsesBody
from appliance.api.responses import chat_body as responses_chat
from appliance.api.schemas import ChatBody
from appliance.api.tools import tool_messages, tool_plan
from appliance.api.translate import chat_messages
from appliance.errors import BadRequest

WORDS = st.sampled_from(
    [
        *("user", "assistant", "tool", "system", "text", "tool_use", "tool_result", "function"),
        *("function_call", "function_call_output", "message", "input_text", "auto", "required"),
        *("none", "any", "f", ""),
    ]
)
NAMES = st.sampled_from(
    [
        *("role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "id"),
        *("call_id", "tool_call_id", "tool_use_id", "output", "input", "parameters", "format"),
    ]
)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-2, 5), WORDS)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=5)),
    max_leaves=12,
)
FIELDS = st.dictionaries(
    st.sampled_from(
        [
            *("messages", "input", "prompt", "system", "instructions", "tools", "tool_choice"),
            *("options", "format", "max_tokens", "stop", "text", "raw"),
        ]
    ),
    JSON,
    max_size=6,
)
DIALECTS: list[tuple[Any, Any]] = [
    (ChatBody, lambda body: body),
    (MessagesBody, messages_chat),
    (ResponsesBody, responses_chat),
    (OllamaChatBody, ollama_chat),
    (OllamaGenerateBody, generate_body),
]


@pytest.mark.parametrize(("model", "translate"), DIALECTS)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(fields=FIELDS)
def test_odd_bodies_are_translated_or_refused(
    model: Any, translate: Any, fields: dict[str, Any]
) -> None:
    base = {"model": "m", "max_tokens": 5, "input": "a", "messages": []}
    try:
        body = translate(body_check({**base, **fields}, model))
        if isinstance(body, ChatBody):
            for tool_format in ("", "hermes", "mistral"):
                plan = tool_plan(
                    body.tools or [], body.tool_choice, is_parallel=True, tool_format=tool_format
                )
                assert tool_messages(chat_messages(body.messages), plan)
    except BadRequest:
        return
