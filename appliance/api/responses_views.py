"""OpenAI's newer endpoint, on the same way as the older ones, and the responses it keeps."""

from functools import partial
from typing import Any

from django.http import HttpRequest, HttpResponseBase

from appliance.api.allowance import with_allowance
from appliance.api.auth import KeyAuth
from appliance.api.body import body_read
from appliance.api.envelope import json_response
from appliance.api.reply import Reply, reply_collect, reply_open
from appliance.api.responses import FORMAT_PARAM, ResponsesBody, chat_body, with_context
from appliance.api.responses_dialect import ResponseFrames, response_answer
from appliance.api.sse import streamed
from appliance.api.stored_responses import (
    input_items,
    items_page,
    response_context,
    response_delete,
    response_get,
    response_store,
)
from appliance.api.translate import chat_requests
from appliance.api.views import api, whole_answer
from appliance.serving.booking import in_db_thread


@api.post("/responses", auth=KeyAuth("chat"))
@with_allowance
async def responses(request: HttpRequest) -> HttpResponseBase:
    body = await body_read(request, ResponsesBody)
    owner_id = request.auth.owner_id
    whole = body
    if body.previous_response_id is not None:
        context = await in_db_thread(response_context, owner_id, body.previous_response_id)
        whole = with_context(body, context)
    requests, plan = chat_requests(chat_body(whole), request.auth, format_param=FORMAT_PARAM)
    opened = partial(reply_open, requests, readers=plan.readers(1))

    async def keep(answer: dict[str, Any]) -> None:
        if answer["store"]:
            items = input_items(body.input)
            answer["store"] = await in_db_thread(response_store, owner_id, items, answer)

    if body.stream:
        frames = ResponseFrames(body)

        async def keep_streamed(reply: Reply) -> None:
            await keep(frames.finish(reply.usage()))

        return await streamed(opened, frames, before_end=keep_streamed)
    reply = await opened()
    [choice] = await reply_collect(reply)
    answer = response_answer(body, choice, reply.usage())
    await keep(answer)
    return whole_answer(answer, reply)


@api.get("/responses/{response_id}", auth=KeyAuth("chat"))
async def response(request: HttpRequest, response_id: str) -> HttpResponseBase:
    """A response that was kept, of the key's own user."""
    stored = await in_db_thread(response_get, request.auth.owner_id, response_id)
    return json_response(stored.answer)


@api.delete("/responses/{response_id}", auth=KeyAuth("chat"))
async def response_gone(request: HttpRequest, response_id: str) -> HttpResponseBase:
    await in_db_thread(response_delete, request.auth.owner_id, response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@api.get("/responses/{response_id}/input_items", auth=KeyAuth("chat"))
async def response_items(request: HttpRequest, response_id: str) -> HttpResponseBase:
    """What was sent for a response, in pages; the newest first unless `order` is `asc`."""
    stored = await in_db_thread(response_get, request.auth.owner_id, response_id)
    page = items_page(
        stored.items,
        limit=request.GET.get("limit", "20"),
        order=request.GET.get("order", "desc"),
        after=request.GET.get("after"),
    )
    return json_response(page)
