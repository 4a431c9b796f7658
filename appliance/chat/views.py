"""The chat page, its list as a fragment, and the small actions on a conversation."""

import uuid
from collections.abc import Callable
from functools import wraps
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.utils.http import content_disposition_header
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import ensure_csrf_cookie
from django.views.decorators.http import require_GET, require_POST

from appliance.chat import services
from appliance.chat.export import file_name, markdown_of
from appliance.chat.generations import generations
from appliance.chat.instructions import instructions_shown
from appliance.chat.models import MessageState, Role
from appliance.chat.selectors import (
    LIST_STEP,
    conversation_data,
    conversation_list,
    quota_data,
)
from appliance.chat.sockets import sockets
from appliance.errors import ApplianceError, EngineUnavailable, NotFound
from appliance.quotas.selectors import quota_status
from appliance.serving.gateway import get_backend
from appliance.serving.types import ModelInfo

LIST_MOST = 5_000
View = Callable[..., HttpResponse]


def json_errors(view: View) -> View:
    """Errors for people as JSON with their status."""

    @wraps(view)
    def answer(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        try:
            return view(request, *args, **kwargs)
        except ApplianceError as exc:
            return JsonResponse({"code": exc.code, "message": exc.message}, status=exc.status)

    return answer


def loaded_model() -> ModelInfo | None:
    try:
        return get_backend().model
    except EngineUnavailable:
        return None


@never_cache
@ensure_csrf_cookie
@require_GET
def chat(request: HttpRequest, conversation_id: uuid.UUID | None = None) -> HttpResponse:
    """A conversation, or with no id the start of a new one."""
    user = request.user
    conversation = None
    messages: list[services.Message] = []
    running = generations.running_ids(user.pk)
    status = 200
    if conversation_id is not None:
        try:
            conversation = services.conversation_get(user.pk, conversation_id)
            messages = services.messages_shown(conversation_id, running=conversation_id in running)
        except NotFound:
            status = 404
    last = messages[-1] if messages else None
    model = loaded_model()
    whole = [m for m in messages if m.state != MessageState.STREAMING]
    context = {
        "conversation": conversation,
        "is_missing": status == 404,
        "turns": messages,
        "last": last,
        "last_position": whole[-1].position if whole else -1,
        "context_used": next(
            (
                (m.prompt_tokens or 0) + (m.completion_tokens or 0)
                for m in reversed(whole)
                if m.role == Role.ASSISTANT
            ),
            0,
        ),
        "list": conversation_list(user, running=running),
        "quota": quota_status(user),
        "model": model,
        "instructions": instructions_shown(model),
    }
    return render(request, "chat/chat.html", context, status=status)


@never_cache
@require_GET
def conversations(request: HttpRequest) -> HttpResponse:
    """The list in the sidebar, whole or searched."""
    try:
        limit = int(request.GET.get("limit", LIST_STEP))
    except ValueError:
        limit = LIST_STEP
    shown = conversation_list(
        request.user,
        query=request.GET.get("q", ""),
        limit=max(1, min(limit, LIST_MOST)),
        running=generations.running_ids(request.user.pk),
    )
    context = {"list": shown, "current_id": request.GET.get("current", "")}
    return render(request, "chat/_list.html", context)


@never_cache
@require_GET
def state(request: HttpRequest) -> JsonResponse:
    """For a page that lost its socket: still signed in (else the log-in answers), model, quota."""
    model = loaded_model()
    return JsonResponse(
        {
            "model": None if model is None else model.name,
            "context_tokens": 0 if model is None else model.context_tokens,
            "quota": quota_data(request.user),
        }
    )


@never_cache
@require_GET
def export(request: HttpRequest, conversation_id: uuid.UUID) -> HttpResponse:
    """The conversation as a file; nothing in it is shown or run by a browser."""
    try:
        conversation = services.conversation_get(request.user.pk, conversation_id)
    except NotFound as exc:
        raise Http404(exc.message) from exc
    running = conversation_id in generations.running_ids(request.user.pk)
    messages = services.messages_shown(conversation_id, running=running)
    disposition = content_disposition_header(True, file_name(conversation.title))
    return HttpResponse(
        markdown_of(conversation, messages),
        content_type="text/markdown; charset=utf-8",
        headers={"Content-Disposition": disposition, "X-Content-Type-Options": "nosniff"},
    )


@require_POST
@json_errors
def rename(request: HttpRequest, conversation_id: uuid.UUID) -> HttpResponse:
    title = request.POST.get("title", "")
    return _changed(services.conversation_rename(request.user, conversation_id, title))


@require_POST
@json_errors
def pin(request: HttpRequest, conversation_id: uuid.UUID) -> HttpResponse:
    pinned = request.POST.get("pinned") == "true"
    return _changed(services.conversation_pin(request.user, conversation_id, pinned))


@require_POST
@json_errors
def delete(request: HttpRequest, conversation_id: uuid.UUID) -> HttpResponse:
    conversation = services.conversation_delete(request.user, conversation_id)
    generations.stop(request.user.pk, conversation_id)
    sockets.send_to_user(
        request.user.pk,
        {"type": "conversation.deleted", "conversation_id": str(conversation_id)},
    )
    return JsonResponse({"conversation": conversation_data(conversation)})


@require_POST
@json_errors
def restore(request: HttpRequest, conversation_id: uuid.UUID) -> HttpResponse:
    return _changed(services.conversation_restore(request.user, conversation_id))


def _changed(conversation: services.Conversation) -> HttpResponse:
    data = conversation_data(conversation)
    running = conversation.pk in generations.running_ids(conversation.owner_id)
    sockets.send_to_user(
        conversation.owner_id,
        {"type": "conversation.updated", "conversation": data, "running": running},
    )
    return JsonResponse({"conversation": data})
