"""Bodies of requests, as OpenAI's reference describes them, plus the common extensions.

Types are strict: "5" is no number and 1 is no bool. Fields that are not here are ignored, as
OpenAI ignores what it does not know; fields that would change the answer but cannot be served
are here, so that `translate` can refuse them by name. Ranges are checked behind the gateway.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

# Fewest and most choices of one request: each is a generation of its own.
MAX_CHOICES = 8
MAX_MESSAGES = 4096
MAX_LOGPROBS = 20
MAX_TOOLS = 128

Role = Literal["system", "developer", "user", "assistant", "tool"]
TokenIds = Annotated[list[int], Field(min_length=1)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


class ContentPart(Body):
    type: str
    text: str | None = None


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionSpec(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolSpec(Body):
    type: Literal["function"]
    function: FunctionSpec


class StreamOptions(Body):
    include_usage: bool | None = None


class JsonSchemaFormat(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    # `schema` is a name of pydantic's own.
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    # Answers are held to every schema.
    strict: bool | None = None


class ResponseFormat(Body):
    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's extension: one of these."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Generate(Body):
    """What both generating endpoints share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    user: str | None = None
    # extensions
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    structured_outputs: StructuredOutputs | None = None


class ChatBody(Generate):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS)] | None = None
    # A word, or an object that names a function.
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    # extensions
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # Named here to be refused by name when they ask for something.
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None


class CompletionBody(Generate):
    prompt: str | TokenIds | list[str | TokenIds]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]


class EmbeddingsBody(Body):
    model: str


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
