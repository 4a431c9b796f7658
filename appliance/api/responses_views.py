"""OpenAI's newer endpoint, on the same way as the older ones."""

from django.http import HttpRequest, HttpResponseBase

from appliance.api.allowance import with_allowance
from appliance.api.auth import KeyAuth
from appliance.api.body import body_read
from appliance.api.reply import reply_collect, reply_open
from appliance.api.responses import ResponsesBody, chat_body
from appliance.api.responses_dialect import ResponseFrames, response_answer
from appliance.api.sse import EventStream, event_stream
from appliance.api.translate import chat_requests
from appliance.api.views import api, whole_answer


@api.post("/responses", auth=KeyAuth("chat"))
@with_allowance
async def responses(request: HttpRequest) -> HttpResponseBase:
    body = await body_read(request, ResponsesBody)
    requests, plan = chat_requests(chat_body(body), request.auth)
    reply = await reply_open(requests, readers=plan.readers(1))
    if body.stream:
        return EventStream(event_stream(reply, ResponseFrames(body)), reply.request_id)
    [choice] = await reply_collect(reply)
    return whole_answer(response_answer(body, choice, reply.usage()), reply)
