"""The endpoints under /v1. Each reads a body, has it translated, opens a reply and answers."""

from functools import partial
from typing import Any

from django.http import HttpRequest, HttpResponseBase
from ninja import NinjaAPI

from appliance.api.allowance import with_allowance
from appliance.api.auth import KeyAuth
from appliance.api.body import body_read
from appliance.api.dialect import (
    ChatFrames,
    CompletionFrames,
    chat_answer,
    completion_answer,
)
from appliance.api.envelope import exception_response, json_response
from appliance.api.reply import Reply, reply_collect, reply_open
from appliance.api.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingsBody,
    Generate,
    TokenizeBody,
)
from appliance.api.sse import streamed
from appliance.api.translate import (
    chat_requests,
    completion_requests,
    loaded_model,
    model_check,
    tokenize_request,
)
from appliance.errors import ApplianceError, BadRequest
from appliance.serving.gateway import get_backend
from appliance.serving.types import ModelInfo

api = NinjaAPI(
    title="Blockhouse",
    version="1",
    description="OpenAI-compatible. Send `Authorization: Bearer KEY`.",
    urls_namespace="v1",
    docs_url=None,
    openapi_url=None,
)


@api.exception_handler(Exception)
@api.exception_handler(ApplianceError)
def on_exception(request: HttpRequest, exc: Exception) -> HttpResponseBase:
    return exception_response(exc, request.path)


# ---- models


@api.api_operation(["GET", "HEAD"], "/models", auth=KeyAuth("models"))
async def models(request: HttpRequest) -> HttpResponseBase:
    """The loaded model, as a list of one; empty while none is loaded."""
    data = [_model_fields(model) for model in shown_models(request)]
    return json_response({"object": "list", "data": data})


def shown_models(request: HttpRequest) -> list[ModelInfo]:
    """What the key may know of."""
    model = get_backend().model
    allowed = request.auth.allowed_models
    return [model] if model and (not allowed or model.name in allowed) else []


@api.api_operation(["GET", "HEAD"], "/models/{path:model_id}", auth=KeyAuth("models"))
async def model(request: HttpRequest, model_id: str) -> HttpResponseBase:
    return json_response(_model_fields(model_check(model_id, request.auth)))


def _model_fields(model: ModelInfo) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.loaded_at,
        "owned_by": "blockhouse",
        "context_length": model.context_tokens,
    }


# ---- generation


@api.post("/chat/completions", auth=KeyAuth("chat"))
@with_allowance
async def chat_completions(request: HttpRequest) -> HttpResponseBase:
    body = await body_read(request, ChatBody)
    requests, plan = chat_requests(body, request.auth)
    opened = partial(
        reply_open,
        requests,
        choices_per_prompt=len(requests),
        readers=plan.readers(len(requests)),
    )
    logprobs = bool(body.logprobs)
    if body.stream:
        frames = ChatFrames(body.model, logprobs=logprobs, include_usage=_wants_usage(body))
        return await streamed(opened, frames)
    reply = await opened()
    choices = await reply_collect(reply)
    return whole_answer(chat_answer(body.model, choices, reply.usage(), logprobs=logprobs), reply)


@api.post("/completions", auth=KeyAuth("chat"))
@with_allowance
async def completions(request: HttpRequest) -> HttpResponseBase:
    body = await body_read(request, CompletionBody)
    requests = completion_requests(body, request.auth)
    opened = partial(reply_open, requests, choices_per_prompt=body.n or 1)
    logprobs = body.logprobs is not None
    echoes = [str(each.prompt) for each in requests] if body.echo else []
    if body.stream:
        frames = CompletionFrames(
            body.model, logprobs=logprobs, include_usage=_wants_usage(body), echoes=echoes
        )
        return await streamed(opened, frames)
    reply = await opened()
    choices = await reply_collect(reply)
    answer = completion_answer(body.model, choices, reply.usage(), logprobs=logprobs, echoes=echoes)
    return whole_answer(answer, reply)


@api.post("/tokenize", auth=KeyAuth("chat"))
async def tokenize(request: HttpRequest) -> HttpResponseBase:
    """The tokens of a text, or of messages as the model's template writes them. Costs nothing."""
    body = await body_read(request, TokenizeBody)
    prepared = await get_backend().prepare(tokenize_request(body, request.auth))
    return json_response(
        {
            "count": prepared.prompt_tokens,
            "max_model_len": loaded_model().context_tokens,
            "tokens": list(prepared.token_ids),
        }
    )


@api.post("/detokenize", auth=KeyAuth("chat"))
async def detokenize(request: HttpRequest) -> HttpResponseBase:
    """The text of tokens, control tokens written out. Costs nothing."""
    body = await body_read(request, DetokenizeBody)
    if body.model is not None:
        model_check(body.model, request.auth)
    return json_response({"prompt": await get_backend().detokenize(body.tokens)})


@api.post("/embeddings", auth=KeyAuth("chat"))
async def embeddings(request: HttpRequest) -> HttpResponseBase:
    """Always refused: what is served here writes text."""
    body = await body_read(request, EmbeddingsBody)
    model = model_check(body.model, request.auth)
    raise BadRequest(
        f"The model {model.name!r} makes text, no embeddings. Ask a server with an embedding "
        "model for them.",
        param="model",
    )


def _wants_usage(body: Generate) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


def whole_answer(answer: dict[str, Any], reply: Reply) -> HttpResponseBase:
    response = json_response(answer)
    response["X-Request-Id"] = reply.request_id
    return response
