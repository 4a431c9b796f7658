"""The OpenAPI document of the API, from the same schemas that check the bodies."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from django.http import HttpRequest, HttpResponseBase
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from appliance.api import openapi_answers as answers
from appliance.api.auth import KeyAuth
from appliance.api.envelope import json_response
from appliance.api.messages import CountBody, MessagesBody
from appliance.api.ollama import OllamaChatBody, OllamaGenerateBody, OllamaShowBody
from appliance.api.responses import ResponsesBody
from appliance.api.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingsBody,
    TokenizeBody,
)
from appliance.api.views import api


@dataclass(frozen=True, slots=True)
class Operation:
    path: str
    summary: str
    answer: answers.Schema
    body: type[BaseModel] | None = None
    # The content type of a stream, where one can be asked for.
    stream: str | None = None
    method: str = "get"


_SSE, _NDJSON = "text/event-stream", "application/x-ndjson"


def _get(path: str, summary: str, answer: answers.Schema) -> Operation:
    return Operation(path, summary, answer)


def _post(
    path: str,
    summary: str,
    body: type[BaseModel],
    answer: answers.Schema,
    stream: str | None = None,
) -> Operation:
    return Operation(path, summary, answer, body, stream, "post")


_OPERATIONS = (
    _get("/v1/models", "The loaded model, as a list", answers.MODELS),
    _get("/v1/models/{model_id}", "The loaded model", answers.MODEL),
    _get("/v1/openapi.json", "This document", answers.ANY_OBJECT),
    _post("/v1/chat/completions", "Answer a conversation", ChatBody, answers.CHAT, _SSE),
    _post("/v1/completions", "Go on with a text", CompletionBody, answers.COMPLETION, _SSE),
    _post("/v1/responses", "Answer items", ResponsesBody, answers.RESPONSE, _SSE),
    _get("/v1/responses/{response_id}", "A kept response of your own", answers.RESPONSE),
    Operation(
        "/v1/responses/{response_id}",
        "Delete a kept response",
        answers.RESPONSE_DELETED,
        method="delete",
    ),
    _get(
        "/v1/responses/{response_id}/input_items",
        "What was sent for a kept response",
        answers.RESPONSE_ITEMS,
    ),
    _post("/v1/tokenize", "Tokens of a text or of messages", TokenizeBody, answers.TOKENS),
    _post("/v1/detokenize", "Text of tokens", DetokenizeBody, answers.PROMPT),
    _post(
        "/v1/embeddings",
        "Refused: the models served here make text",
        EmbeddingsBody,
        answers.ANY_OBJECT,
    ),
    _post(
        "/v1/messages",
        "Anthropic's form: answer a conversation",
        MessagesBody,
        answers.MESSAGE,
        _SSE,
    ),
    _post(
        "/v1/messages/count_tokens",
        "Anthropic's form: length of a prompt",
        CountBody,
        answers.COUNT,
    ),
    _post(
        "/api/chat",
        "Ollama's form: answer a conversation",
        OllamaChatBody,
        answers.OLLAMA_CHAT,
        _NDJSON,
    ),
    _post(
        "/api/generate",
        "Ollama's form: answer a prompt",
        OllamaGenerateBody,
        answers.OLLAMA_TEXT,
        _NDJSON,
    ),
    _get("/api/tags", "Ollama's form: the loaded model, as a list", answers.OLLAMA_MODELS),
    _get("/api/ps", "Ollama's form: the running model, as a list", answers.OLLAMA_MODELS),
    _post(
        "/api/show",
        "Ollama's form: about the loaded model",
        OllamaShowBody,
        answers.OLLAMA_SHOW,
    ),
    _get("/api/version", "Ollama's form: version of this server", answers.OLLAMA_VERSION),
)
_REFS = "#/components/schemas/"
_ERRORS = {
    "400": "A field is wrong or not supported",
    "401": "No key, or one that does not hold",
    "403": "The key may not do this",
    "404": "No such model, response or address",
    "405": "Not possible here, see Allow",
    "408": "The request took too long to arrive",
    "413": "The body is too large",
    "415": "The body is no application/json",
    "429": "A limit is reached, see Retry-After",
    "500": "The server failed",
    "503": "Come back later, see Retry-After",
}
_QUERY = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
}


@api.get("/openapi.json", auth=KeyAuth("models"))
async def openapi(request: HttpRequest) -> HttpResponseBase:
    return json_response(document())


@cache
def document() -> dict[str, Any]:
    bodies = [each.body for each in _OPERATIONS if each.body is not None]
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template=_REFS + "{model}"
    )
    errors = {
        "Error": answers.OPENAI_ERROR,
        "AnthropicError": answers.ANTHROPIC_ERROR,
        "OllamaError": answers.OLLAMA_ERROR,
    }
    components = {
        "schemas": {**schemas["$defs"], **errors},
        "securitySchemes": {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        },
    }
    paths: dict[str, dict[str, Any]] = {}
    for each in _OPERATIONS:
        paths.setdefault(each.path, _parameters(each.path))[each.method] = _described(each)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Blockhouse",
            "version": "1",
            "description": "OpenAI-compatible, with Anthropic's and Ollama's forms beside it.",
        },
        "security": [{"key": []}],
        "components": components,
        "paths": paths,
    }


def _described(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": _responses(operation),
    }
    if operation.path.startswith("/v1/messages"):
        described["security"] = [{"key": []}, {"x-api-key": []}]
    if operation.body is not None:
        content = {"application/json": {"schema": {"$ref": _REFS + operation.body.__name__}}}
        described["requestBody"] = {"required": True, "content": content}
    if operation.path.endswith("/input_items"):
        described["parameters"] = [
            {"name": name, "in": "query", "schema": schema} for name, schema in _QUERY.items()
        ]
    return described


def _parameters(path: str) -> dict[str, Any]:
    _, brace, rest = path.partition("{")
    if not brace:
        return {}
    name = rest.partition("}")[0]
    described = {"name": name, "in": "path", "required": True, "schema": answers.TEXT}
    return {"parameters": [described]}


def _responses(operation: Operation) -> dict[str, Any]:
    kind = "Error"
    if operation.path.startswith("/v1/messages"):
        kind = "AnthropicError"
    elif operation.path.startswith("/api/"):
        kind = "OllamaError"
    error = {"application/json": {"schema": {"$ref": _REFS + kind}}}
    failures = {status: {"description": text, "content": error} for status, text in _ERRORS.items()}
    content: dict[str, Any] = {"application/json": {"schema": operation.answer}}
    is_sse = operation.stream == _SSE
    if operation.stream is not None:
        content[operation.stream] = {"schema": answers.EVENT if is_sse else answers.TEXT}
    return {"200": {"description": "The answer", "content": content}, **failures}
