"""The admins' page of the team's instructions. Async: the model counts the tokens."""

from asgiref.sync import sync_to_async
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from appliance.accounts.models import User
from appliance.chat import instructions as team
from appliance.errors import ApplianceError, EngineUnavailable
from appliance.serving.gateway import get_backend

PAGE = "chat/instructions.html"
SAVED = "Saved. It holds from the next answer on."
TAKEN_AWAY = "Saved. Chats have no instructions from the next answer on."


@never_cache
@require_http_methods(["GET", "POST"])
async def instructions(request: HttpRequest) -> HttpResponse:
    user = await request.auser()
    if not isinstance(user, User) or not user.is_admin:
        raise PermissionDenied
    if request.method != "POST":
        return await _page(request)
    text = request.POST.get("text", "")
    try:
        if version := request.POST.get("again"):
            text = (await sync_to_async(team.instructions_version)(_number(version))).text
        kept = await team.instructions_check(text)
        save = sync_to_async(team.instructions_save)
        is_new = await save(kept, user, if_version=_number(request.POST.get("version", "")))
    except ApplianceError as exc:
        return await _page(request, text, exc)
    said = (SAVED if kept else TAKEN_AWAY) if is_new else "Nothing was changed."
    await sync_to_async(messages.success)(request, said)
    return redirect("chat:instructions")


async def _page(
    request: HttpRequest, text: str | None = None, exc: ApplianceError | None = None
) -> HttpResponse:
    """The page, with a `text` that was refused for the reason `exc`."""
    versions = await sync_to_async(team.instructions_versions)()
    now = versions[0] if versions else None
    try:
        model = get_backend().model
        num_tokens = await team.instructions_tokens(now.text) if now and now.text else 0
    except EngineUnavailable:
        model, num_tokens = None, 0
    context = {
        "section": "instructions",
        "text": text if text is not None else (now.text if now else ""),
        "refused": exc.message if exc else "",
        "now": now,
        "versions": [{"row": row, "start": team.named(row.text)} for row in versions],
        "model": model,
        "num_tokens": num_tokens,
        "fits": model is None or team.instructions_fit(num_tokens, model),
        "limit": team.instructions_limit(model) if model else 0,
        "max_chars": team.MAX_CHARS,
    }
    status = exc.status if exc else 200
    return await sync_to_async(render)(request, PAGE, context, status=status)


def _number(text: str) -> int:
    """An id as a form sends it; 0 is nobody's."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else 0
