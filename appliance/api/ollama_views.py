"""Ollama's endpoints, on the same way as OpenAI's. A key is needed, as everywhere."""

import tomllib
from functools import cache, partial
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponseBase
from ninja import NinjaAPI

from appliance.api.allowance import with_allowance
from appliance.api.auth import KeyAuth
from appliance.api.body import body_read
from appliance.api.envelope import exception_response, json_response
from appliance.api.ollama import (
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaShowBody,
    chat_body,
    generate_body,
    ollama_name,
)
from appliance.api.ollama_dialect import (
    NDJSON,
    OllamaFrames,
    details,
    end_fields,
    model_fields,
    ollama_answer,
    timestamp,
)
from appliance.api.reply import reply_collect, reply_open
from appliance.api.schemas import ChatBody
from appliance.api.sse import OpenReply, streamed
from appliance.api.translate import chat_requests, completion_requests, model_check
from appliance.api.views import shown_models, whole_answer
from appliance.errors import ApplianceError, BadRequest

ollama_api = NinjaAPI(
    title="Blockhouse for Ollama's clients",
    urls_namespace="ollama",
    docs_url=None,
    openapi_url=None,
)


@ollama_api.exception_handler(Exception)
@ollama_api.exception_handler(ApplianceError)
def on_exception(request: HttpRequest, exc: Exception) -> HttpResponseBase:
    return exception_response(exc, request.path)


# ---- generation


@ollama_api.post("/chat", auth=KeyAuth("chat"))
@with_allowance
async def chat(request: HttpRequest) -> HttpResponseBase:
    body = await body_read(request, OllamaChatBody)
    if not body.messages:
        return _loaded(request, body, is_chat=True)
    requests, plan = chat_requests(chat_body(body), request.auth, format_param="format")
    opened = partial(reply_open, requests, readers=plan.readers(1))
    return await _answered(body, opened, is_chat=True)


@ollama_api.post("/generate", auth=KeyAuth("chat"))
@with_allowance
async def generate(request: HttpRequest) -> HttpResponseBase:
    body = await body_read(request, OllamaGenerateBody)
    if not body.prompt:
        return _loaded(request, body, is_chat=False)
    translated = generate_body(body)
    if isinstance(translated, ChatBody):
        requests, _ = chat_requests(translated, request.auth, format_param="format")
    else:
        requests = completion_requests(translated, request.auth, default_max_tokens=None)
    return await _answered(body, partial(reply_open, requests), is_chat=False)


async def _answered(body: OllamaBody, opened: OpenReply, *, is_chat: bool) -> HttpResponseBase:
    if body.is_streamed:
        frames = OllamaFrames(body.model, is_chat=is_chat)
        return await streamed(opened, frames, content_type=NDJSON)
    reply = await opened()
    [choice] = await reply_collect(reply)
    assert choice.finished is not None, "an answer ended without its end"
    end = end_fields(choice.finished, reply.usage())
    answer = ollama_answer(body.model, choice.text, choice.calls, is_chat=is_chat, **end)
    return whole_answer(answer, reply)


def _loaded(request: HttpRequest, body: OllamaBody, *, is_chat: bool) -> HttpResponseBase:
    """Nothing to say means there: load the model. It is loaded."""
    model_check(ollama_name(body.model), request.auth)
    return json_response(
        ollama_answer(body.model, "", is_chat=is_chat, done=True, done_reason="load")
    )


@ollama_api.post("/embed", auth=KeyAuth("chat"))
@ollama_api.post("/embeddings", auth=KeyAuth("chat"))
async def embed(request: HttpRequest) -> HttpResponseBase:
    raise BadRequest("The model in use makes text, no embeddings.")


# ---- models


@ollama_api.api_operation(["GET", "HEAD"], "/tags", auth=KeyAuth("models"))
async def tags(request: HttpRequest) -> HttpResponseBase:
    return json_response({"models": [model_fields(model) for model in shown_models(request)]})


@ollama_api.api_operation(["GET", "HEAD"], "/ps", auth=KeyAuth("models"))
async def ps(request: HttpRequest) -> HttpResponseBase:
    running = [
        {
            **model_fields(model),
            # It stays loaded as long as the server runs.
            "expires_at": timestamp(model.loaded_at + 100 * 365 * 24 * 3600),
            "size_vram": 0,
            "context_length": model.context_tokens,
        }
        for model in shown_models(request)
    ]
    return json_response({"models": running})


@ollama_api.post("/show", auth=KeyAuth("models"))
async def show(request: HttpRequest) -> HttpResponseBase:
    body = await body_read(request, OllamaShowBody)
    model = model_check(ollama_name(body.model), request.auth)
    fields: dict[str, Any] = {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "modified_at": timestamp(model.loaded_at),
        "details": details(model),
        "model_info": {
            "general.basename": model.name,
            "general.context_length": model.context_tokens,
            "general.vocab_size": model.vocab_size,
        },
        "capabilities": ["completion", "tools"],
    }
    return json_response(fields)


@ollama_api.api_operation(["GET", "HEAD"], "/version", auth=KeyAuth("models"))
async def version(request: HttpRequest) -> HttpResponseBase:
    return json_response({"version": _version()})


@cache
def _version() -> str:
    project = tomllib.loads((settings.BASE_DIR / "pyproject.toml").read_text(encoding="utf-8"))
    return str(project["project"]["version"])
