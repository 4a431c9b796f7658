"""Anthropic's endpoints, on the same way as OpenAI's."""

from dataclasses import replace
from functools import partial

from django.http import HttpRequest, HttpResponseBase

from appliance.api.allowance import with_allowance
from appliance.api.auth import MessagesKeyAuth
from appliance.api.body import body_read
from appliance.api.envelope import json_response
from appliance.api.messages import FORMAT_PARAM, CountBody, MessagesBody, chat_body
from appliance.api.messages_dialect import MessageFrames, message_answer
from appliance.api.reply import reply_collect, reply_open
from appliance.api.sse import streamed
from appliance.api.translate import chat_requests
from appliance.api.views import api, whole_answer
from appliance.serving.gateway import get_backend


@api.post("/messages", auth=MessagesKeyAuth("chat"))
@with_allowance
async def messages(request: HttpRequest) -> HttpResponseBase:
    body = await body_read(request, MessagesBody)
    requests, plan = chat_requests(chat_body(body), request.auth, format_param=FORMAT_PARAM)
    opened = partial(reply_open, requests, readers=plan.readers(1))
    stop = tuple(body.stop_sequences or ())
    if body.stream:
        return await streamed(opened, MessageFrames(body.model, stop))
    reply = await opened()
    [choice] = await reply_collect(reply)
    return whole_answer(message_answer(body.model, choice, reply.usage(), stop), reply)


@api.post("/messages/count_tokens", auth=MessagesKeyAuth("chat"))
async def count_tokens(request: HttpRequest) -> HttpResponseBase:
    """How long the prompt of such a message is. Costs nothing."""
    body = await body_read(request, CountBody)
    [counted], _ = chat_requests(chat_body(body), request.auth)
    prepared = await get_backend().prepare(replace(counted, answer_start="", form=None))
    return json_response({"input_tokens": prepared.prompt_tokens})
