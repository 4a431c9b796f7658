"""JSON schemas of what the API answers, for its OpenAPI document. The dialects make the answers."""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
ANY_OBJECT: Schema = {"type": "object"}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def exactly(*values: str) -> Schema:
    return {"enum": list(values)}


def list_of(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def answer(**properties: Schema) -> Schema:
    """An object with these, all of them there, and perhaps others."""
    return {"type": "object", "required": list(properties), "properties": properties}


# One event of a stream: its data is JSON, or [DONE].
EVENT = answer(data=TEXT)

OPENAI_ERROR = answer(error=answer(message=TEXT, type=TEXT, param=nullable(TEXT), code=TEXT))
ANTHROPIC_ERROR = answer(type=exactly("error"), error=answer(type=TEXT, message=TEXT))
OLLAMA_ERROR = answer(error=TEXT)

MODEL = answer(
    id=TEXT, object=exactly("model"), created=NUMBER, owned_by=TEXT, context_length=NUMBER
)
MODELS = answer(object=exactly("list"), data=list_of(MODEL))

_USAGE = answer(
    prompt_tokens=NUMBER,
    completion_tokens=NUMBER,
    total_tokens=NUMBER,
    prompt_tokens_details=answer(cached_tokens=NUMBER),
)
_CALL = answer(id=TEXT, type=exactly("function"), function=answer(name=TEXT, arguments=TEXT))
_MESSAGE = answer(role=exactly("assistant"), content=nullable(TEXT))
_MESSAGE["properties"]["tool_calls"] = list_of(_CALL)
CHAT = answer(
    id=TEXT,
    object=exactly("chat.completion"),
    created=NUMBER,
    model=TEXT,
    choices=list_of(
        answer(
            index=NUMBER,
            message=_MESSAGE,
            logprobs=nullable(ANY_OBJECT),
            finish_reason=exactly("stop", "length", "tool_calls"),
        )
    ),
    usage=_USAGE,
)
COMPLETION = answer(
    id=TEXT,
    object=exactly("text_completion"),
    created=NUMBER,
    model=TEXT,
    choices=list_of(
        answer(
            index=NUMBER,
            text=TEXT,
            logprobs=nullable(ANY_OBJECT),
            finish_reason=exactly("stop", "length"),
        )
    ),
    usage=_USAGE,
)
RESPONSE = answer(
    id=TEXT,
    object=exactly("response"),
    created_at=NUMBER,
    status=exactly("completed", "incomplete"),
    model=TEXT,
    output=list_of(answer(id=TEXT, type=exactly("message", "function_call"))),
    previous_response_id=nullable(TEXT),
    store=FLAG,
    usage=answer(input_tokens=NUMBER, output_tokens=NUMBER, total_tokens=NUMBER),
)
RESPONSE_DELETED = answer(id=TEXT, object=exactly("response"), deleted={"const": True})
RESPONSE_ITEMS = answer(
    object=exactly("list"),
    data=list_of(answer(id=TEXT, type=TEXT)),
    first_id=nullable(TEXT),
    last_id=nullable(TEXT),
    has_more=FLAG,
)
TOKENS = answer(count=NUMBER, max_model_len=NUMBER, tokens=list_of(NUMBER))
PROMPT = answer(prompt=TEXT)
MESSAGE = answer(
    id=TEXT,
    type=exactly("message"),
    role=exactly("assistant"),
    model=TEXT,
    content=list_of(answer(type=exactly("text", "tool_use"))),
    stop_reason=exactly("end_turn", "max_tokens", "stop_sequence", "tool_use"),
    stop_sequence=nullable(TEXT),
    usage=answer(input_tokens=NUMBER, output_tokens=NUMBER),
)
COUNT = answer(input_tokens=NUMBER)
OLLAMA_CHAT = answer(model=TEXT, created_at=TEXT, message=answer(role=TEXT), done=FLAG)
OLLAMA_TEXT = answer(model=TEXT, created_at=TEXT, response=TEXT, done=FLAG)
OLLAMA_MODELS = answer(models=list_of(answer(name=TEXT, model=TEXT, details=ANY_OBJECT)))
OLLAMA_SHOW = answer(details=ANY_OBJECT, model_info=ANY_OBJECT, capabilities=list_of(TEXT))
OLLAMA_VERSION = answer(version=TEXT)
