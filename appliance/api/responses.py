"""OpenAI's `/v1/responses`: its body in the words of `chat/completions`."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from appliance.api.body import body_check
from appliance.api.schemas import MAX_MESSAGES, MAX_TOOLS, Body, ChatBody, ContentPart, Role
from appliance.errors import BadRequest

# This dialect's name of `response_format`.
FORMAT_PARAM = "text.format"


class Item(Body):
    type: str = "message"
    role: Role | None = None
    content: str | list[ContentPart] | None = None
    # function_call and function_call_output
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class ResponseTool(Body):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class TextFormat(Body):
    type: str
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None


class ResponsesBody(Body):
    model: str
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    text: TextOptions | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    # Named here to be refused by name when they ask for something.
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None


def with_context(body: ResponsesBody, context: Sequence[Item]) -> ResponsesBody:
    """The body with what was said before in front of its own input. Raises BadRequest."""
    given = [Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    items = [*context, *given]
    if len(items) > MAX_MESSAGES:
        raise BadRequest(
            f"This conversation has {len(items)} items; at most {MAX_MESSAGES} are allowed.",
            param="previous_response_id",
        )
    return body.model_copy(update={"input": items})


def chat_body(body: ResponsesBody) -> ChatBody:
    """The same request in the words of chat. Raises BadRequest."""
    _refuse_unsupported(body)
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": _messages(body),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "tools": [_tool(tool, at) for at, tool in enumerate(body.tools or [])],
        "tool_choice": _choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body),
    }
    return body_check(fields, ChatBody)


def _refuse_unsupported(body: ResponsesBody) -> None:
    asked = {
        "conversation": body.conversation is not None,
        "background": bool(body.background),
        "prompt": body.prompt is not None,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise BadRequest(f"{name} is not supported by this server.", param=name)
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise BadRequest("max_output_tokens must be at least 1.", param="max_output_tokens")


def _response_format(body: ResponsesBody) -> dict[str, Any] | None:
    asked = body.text.format if body.text else None
    if asked is None:
        return None
    if asked.type != "json_schema":
        return {"type": asked.type}
    name = _needed(asked.name, FORMAT_PARAM + ".name")
    schema = _needed(asked.schema_, FORMAT_PARAM + ".schema")
    return {"type": asked.type, "json_schema": {"name": name, "schema": schema}}


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for at, item in enumerate(body.input):
        where = f"input[{at}]"
        if item.type == "function_call":
            _add_call(messages, item, where)
        elif item.type == "function_call_output":
            content = _text(item.output, f"{where}.output")
            call_id = _needed(item.call_id, f"{where}.call_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif item.type == "message":
            role = _needed(item.role, f"{where}.role")
            messages.append({"role": role, "content": _text(item.content, f"{where}.content")})
        # What a model thought is no part of what it said.
        elif item.type != "reasoning":
            raise BadRequest(
                f"An item of type {item.type[:50]!r} is not supported.", param=f"{where}.type"
            )
    return messages


def _add_call(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    """A call belongs to what the assistant said just before it."""
    call = {
        "id": _needed(item.call_id, f"{where}.call_id"),
        "function": {
            "name": _needed(item.name, f"{where}.name"),
            "arguments": _needed(item.arguments, f"{where}.arguments"),
        },
    }
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _text(content: str | list[ContentPart] | None, where: str) -> str:
    if content is None:
        raise BadRequest(f"{where} is missing.", param=where)
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in ("input_text", "output_text", "text") or part.text is None:
            raise BadRequest(
                f"Content of type {part.type[:50]!r} is not supported: the model reads text only.",
                param=where,
            )
    return "\n".join(part.text or "" for part in content)


def _needed(value: Any, where: str) -> Any:
    if value is None:
        raise BadRequest(f"{where} is missing.", param=where)
    return value


def _tool(tool: ResponseTool, at: int) -> dict[str, Any]:
    if tool.type != "function":
        raise BadRequest(
            f"This server has no tool of type {tool.type[:50]!r}; give functions of your own.",
            param=f"tools[{at}].type",
        )
    function = {
        "name": _needed(tool.name, f"tools[{at}].name"),
        "description": tool.description,
        "parameters": tool.parameters,
    }
    return {"type": "function", "function": function}


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict) and "name" in choice:
        return {"type": choice.get("type"), "function": {"name": choice["name"]}}
    return choice
