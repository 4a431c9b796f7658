"""A page to try calls of the API: the browser sends them itself, with a key that is typed in."""

import json
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET

from appliance.api.openapi import document
from appliance.errors import EngineUnavailable
from appliance.serving.gateway import get_backend


@dataclass(frozen=True, slots=True)
class Example:
    method: str
    path: str
    name: str
    body: str = ""


def examples(model: str) -> list[Example]:
    messages = [{"role": "user", "content": "What is the capital of France?"}]

    def post(path: str, name: str, **fields: Any) -> Example:
        return Example("POST", path, name, json.dumps({"model": model, **fields}, indent=2))

    return [
        post("/v1/chat/completions", "a conversation", messages=messages, stream=True),
        post("/v1/completions", "a text goes on", prompt="Once upon a time", stream=True),
        post("/v1/responses", "OpenAI's newer form", input="Hello", stream=True),
        post("/v1/messages", "Anthropic's form", max_tokens=100, messages=messages, stream=True),
        post("/api/chat", "Ollama's form", messages=messages),
        post("/v1/tokenize", "count tokens", messages=messages),
        Example("GET", "/v1/models", "what is loaded"),
        Example("GET", "/v1/openapi.json", "every address"),
    ]


@never_cache
@require_GET
def try_page(request: HttpRequest) -> HttpResponse:
    try:
        model = get_backend().model
    except EngineUnavailable:
        model = None
    context = {"examples": examples(model.name if model else ""), "is_loaded": model is not None}
    return render(request, "accounts/try.html", context)


@require_GET
def openapi_download(request: HttpRequest) -> HttpResponse:
    """The same document as /v1/openapi.json, for who is signed in."""
    return JsonResponse(document())
