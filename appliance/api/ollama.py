"""Ollama's `/api/chat` and `/api/generate`: their bodies, in the words of OpenAI's."""

from typing import Annotated, Any

from pydantic import Field

from appliance.api.answer_form import ollama_format
from appliance.api.body import body_check
from appliance.api.schemas import MAX_MESSAGES, Body, ChatBody, CompletionBody, Role, ToolSpec
from appliance.api.tools import arguments_json
from appliance.errors import BadRequest

# Ollama's name of an option -> OpenAI's. Others, such as num_ctx, are the server's business.
_OPTIONS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}


class OllamaFunction(Body):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaCall(Body):
    function: OllamaFunction


class OllamaMessage(Body):
    role: Role
    content: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaCall] | None = None


class OllamaBody(Body):
    model: str
    # Unlike everywhere else, an answer is streamed unless this is false.
    stream: bool | None = None
    format: Any = None
    options: dict[str, Any] | None = None

    @property
    def is_streamed(self) -> bool:
        return self.stream is not False


class OllamaChatBody(OllamaBody):
    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES)] = Field(
        default_factory=list
    )
    tools: list[ToolSpec] | None = None


class OllamaGenerateBody(OllamaBody):
    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    images: list[Any] | None = None


class OllamaShowBody(Body):
    model: str


def ollama_name(name: str) -> str:
    """The model's name without Ollama's usual tag."""
    return name.removesuffix(":latest")


def chat_body(body: OllamaChatBody) -> ChatBody:
    fields = _fields(body)
    fields["messages"] = _messages(body.messages)
    fields["response_format"] = ollama_format(body.format)
    if body.tools:
        fields["tools"] = [tool.model_dump() for tool in body.tools]
    return body_check(fields, ChatBody)


def generate_body(body: OllamaGenerateBody) -> ChatBody | CompletionBody:
    """A conversation of one message, or with `raw` the prompt as it is."""
    if body.images:
        raise BadRequest("images are not supported: the model reads text only.", param="images")
    if body.suffix:
        raise BadRequest("suffix is not supported.", param="suffix")
    fields = _fields(body)
    if body.raw:
        if body.format:
            raise BadRequest("format cannot be combined with raw.", param="format")
        return body_check({**fields, "prompt": body.prompt}, CompletionBody)
    messages = [{"role": "user", "content": body.prompt}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    fields["response_format"] = ollama_format(body.format)
    return body_check({**fields, "messages": messages}, ChatBody)


def _fields(body: OllamaBody) -> dict[str, Any]:
    options = body.options or {}
    fields = {ours: options[theirs] for theirs, ours in _OPTIONS.items() if theirs in options}
    limit = options.get("num_predict")
    # Below zero means: as long as there is room.
    if limit is not None and not (isinstance(limit, int) and limit < 0):
        fields["max_tokens"] = limit
    return {**fields, "model": ollama_name(body.model)}


def _messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Calls have no ids there: answers belong to the calls before them, in order."""
    translated: list[dict[str, Any]] = []
    waiting: list[str] = []
    num_calls = 0
    for at, message in enumerate(messages):
        if message.images:
            raise BadRequest(
                "images are not supported: the model reads text only.",
                param=f"messages[{at}].images",
            )
        fields: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.tool_calls:
            fields["tool_calls"] = []
            waiting = []
            for call in message.tool_calls:
                num_calls += 1
                waiting.append(f"call_{num_calls:09}")
                where = f"messages[{at}].tool_calls"
                arguments = arguments_json(call.function.arguments, where)
                function = {"name": call.function.name, "arguments": arguments}
                fields["tool_calls"].append({"id": waiting[-1], "function": function})
        elif message.role == "tool":
            fields["tool_call_id"] = waiting.pop(0) if waiting else "call_000000000"
        translated.append(fields)
    return translated
