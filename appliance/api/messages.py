"""Anthropic's `/v1/messages`: its bodies, as one of `chat/completions` says the same."""

from typing import Annotated, Any, Literal

from pydantic import Field

from appliance.api.body import body_check
from appliance.api.schemas import MAX_MESSAGES, MAX_TOOLS, Body, ChatBody
from appliance.api.tools import arguments_json
from appliance.errors import BadRequest

# This dialect's name of `response_format`.
FORMAT_PARAM = "output_config.format"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Block(Body):
    type: str
    text: str | None = None
    # tool_use
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    # tool_result
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None


class ClaudeMessage(Body):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class ClaudeTool(Body):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountBody(Body):
    model: str
    messages: Annotated[list[ClaudeMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Block] | None = None
    tools: Annotated[list[ClaudeTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None


class OutputFormat(Body):
    type: str
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class OutputConfig(Body):
    format: OutputFormat | None = None


class MessagesBody(CountBody):
    max_tokens: Annotated[int, Field(ge=1)]
    output_config: OutputConfig | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


def chat_body(body: CountBody) -> ChatBody:
    """The same request in OpenAI's words. Raises BadRequest."""
    fields: dict[str, Any] = {"model": body.model, "messages": _messages(body)}
    # An answer that the caller began.
    fields["continue_final_message"] = body.messages[-1].role == "assistant"
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields["tool_choice"] = _choice(body.tool_choice)
        fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if isinstance(body, MessagesBody):
        fields |= {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "response_format": _response_format(body.output_config),
        }
    return body_check(fields, ChatBody)


def _response_format(config: OutputConfig | None) -> dict[str, Any] | None:
    asked = config.format if config is not None else None
    if asked is None:
        return None
    if asked.type != "json_schema":
        raise BadRequest(
            f"{FORMAT_PARAM} has the type {asked.type[:50]!r}; json_schema is allowed.",
            param=FORMAT_PARAM,
        )
    return {"type": asked.type, "json_schema": {"name": "format", "schema": asked.schema_}}


def _messages(body: CountBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for at, message in enumerate(body.messages):
        where = f"messages[{at}].content"
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message.content, where))
        else:
            messages += _user(message.content, where)
    return messages


def _assistant(blocks: list[Block], where: str) -> dict[str, Any]:
    calls = [
        {
            "id": block.id or "",
            "function": {
                "name": block.name or "",
                "arguments": arguments_json(block.input or {}, where),
            },
        }
        for block in blocks
        if block.type == "tool_use"
    ]
    # What a model thought is no part of what it said.
    others = ("tool_use", "thinking", "redacted_thinking")
    text = _text([block for block in blocks if block.type not in others], where)
    return {"role": "assistant", "content": text, "tool_calls": calls or None}


def _user(blocks: list[Block], where: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [
        {
            "role": "tool",
            "tool_call_id": block.tool_use_id or "",
            "content": _text(block.content or "", where),
        }
        for block in blocks
        if block.type == "tool_result"
    ]
    rest = [block for block in blocks if block.type != "tool_result"]
    if rest or not messages:
        messages.append({"role": "user", "content": _text(rest, where)})
    return messages


def _text(content: str | list[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text" or block.text is None:
            raise BadRequest(
                f"{where} has a block of type {block.type[:50]!r}: the model reads text only.",
                param=where,
            )
    return "\n".join(block.text or "" for block in content)


def _tool(tool: ClaudeTool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise BadRequest(f"{where}: this server has no tool of type {tool.type[:50]!r}.")
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return _CHOICES[choice.type]
