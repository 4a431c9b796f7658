"""The OpenAPI document of the API, from the same schemas that check the bodies."""

from functools import cache
from typing import Any

from django.http import HttpRequest, HttpResponseBase
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

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

# Path -> what it does, and the body it takes; without a body it is a GET.
_OPERATIONS: dict[str, tuple[str, type[BaseModel] | None]] = {
    "/v1/models": ("The loaded model, as a list", None),
    "/v1/models/{model_id}": ("The loaded model", None),
    "/v1/openapi.json": ("This document", None),
    "/v1/chat/completions": ("Answer a conversation, streamed or whole", ChatBody),
    "/v1/completions": ("Go on with a text, streamed or whole", CompletionBody),
    "/v1/responses": ("Answer items, streamed or whole", ResponsesBody),
    "/v1/tokenize": ("Tokens of a text or of messages", TokenizeBody),
    "/v1/detokenize": ("Text of tokens", DetokenizeBody),
    "/v1/embeddings": ("Refused: the models served here make text", EmbeddingsBody),
    "/v1/messages": ("Anthropic's form: answer a conversation", MessagesBody),
    "/v1/messages/count_tokens": ("Anthropic's form: length of a prompt", CountBody),
    "/api/chat": ("Ollama's form: answer a conversation", OllamaChatBody),
    "/api/generate": ("Ollama's form: answer a prompt", OllamaGenerateBody),
    "/api/tags": ("Ollama's form: the loaded model, as a list", None),
    "/api/ps": ("Ollama's form: the running model, as a list", None),
    "/api/show": ("Ollama's form: about the loaded model", OllamaShowBody),
    "/api/version": ("Ollama's form: version of this server", None),
}
_REFS = "#/components/schemas/"
_ERRORS = {
    "400": "A field is wrong or not supported",
    "401": "No key, or one that does not hold",
    "403": "The key may not do this",
    "404": "No such model",
    "429": "A limit is reached",
    "503": "Come back later, see Retry-After",
}


@api.get("/openapi.json", auth=KeyAuth("models"))
async def openapi(request: HttpRequest) -> HttpResponseBase:
    return json_response(document())


@cache
def document() -> dict[str, Any]:
    bodies = [body for _, body in _OPERATIONS.values() if body is not None]
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template=_REFS + "{model}"
    )
    components = {
        "schemas": {**schemas["$defs"], "Error": _error_schema()},
        "securitySchemes": {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Blockhouse",
            "version": "1",
            "description": "OpenAI-compatible, with Anthropic's and Ollama's forms beside it.",
        },
        "security": [{"key": []}],
        "components": components,
        "paths": {path: _path(path, *what) for path, what in _OPERATIONS.items()},
    }


def _path(path: str, summary: str, body: type[BaseModel] | None) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": summary, "responses": _responses(path)}
    if path.startswith("/v1/messages"):
        operation["security"] = [{"key": []}, {"x-api-key": []}]
    if body is None:
        return {"get": operation, **_parameters(path)}
    schema = {"$ref": _REFS + body.__name__}
    content = {"application/json": {"schema": schema}}
    operation["requestBody"] = {"required": True, "content": content}
    return {"post": operation}


def _parameters(path: str) -> dict[str, Any]:
    if "{" not in path:
        return {}
    schema = {"type": "string"}
    return {"parameters": [{"name": "model_id", "in": "path", "required": True, "schema": schema}]}


def _responses(path: str) -> dict[str, Any]:
    is_openai = path.startswith("/v1/") and not path.startswith("/v1/messages")
    schema = {"$ref": f"{_REFS}Error"} if is_openai else {"type": "object"}
    content = {"application/json": {"schema": schema}}
    failures = {
        status: {"description": text, "content": content} for status, text in _ERRORS.items()
    }
    return {"200": {"description": "The answer"}, **failures}


def _error_schema() -> dict[str, Any]:
    text = {"type": "string"}
    nullable = {"type": ["string", "null"]}
    error = {
        "type": "object",
        "required": ["message", "type", "param", "code"],
        "properties": {"message": text, "type": text, "param": nullable, "code": text},
    }
    return {"type": "object", "required": ["error"], "properties": {"error": error}}
