"""Answers of `/v1/responses`: a list of items, whole or as named and numbered events."""

import time
import uuid
from typing import Any

import orjson

from appliance.api.reply import Piece, UsageCount
from appliance.api.responses import ResponsesBody
from appliance.api.sse import CommentedFrames
from appliance.api.tools import ToolCall
from appliance.errors import ApplianceError

Fields = dict[str, Any]


class ResponseFrames(CommentedFrames):
    """One item is open at a time: the text, or a call of a function."""

    def __init__(self, body: ResponsesBody) -> None:
        self._head = _head(body)
        self._items: list[Fields] = []
        self._number = 0
        self._texts: list[str] | None = None
        self._item_id = ""
        self._reason: str | None = None
        self._last_frames = b""
        self._response: Fields | None = None

    def start(self, num_choices: int, prompt_tokens: int) -> bytes:
        response = {**self._head, "status": "in_progress", "output": [], "usage": None}
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def piece(self, piece: Piece) -> bytes:
        frames = b""
        if piece.text:
            if self._texts is None:
                frames += self._open_text()
            assert self._texts is not None, "opened above"
            self._texts.append(piece.text)
            frames += self._part("response.output_text.delta", delta=piece.text, logprobs=[])
        for call in piece.calls:
            frames += self._close_text() + self._call(call)
        self._reason = piece.finish_reason or self._reason
        return frames

    def finish(self, usage: UsageCount) -> Fields:
        """Close what is open; the response as `end` will send it, to be kept before."""
        if not self._items and self._texts is None:
            self._last_frames += self._open_text()
        self._last_frames += self._close_text()
        self._response = {**self._head, **_ending(self._reason, self._items, usage)}
        return self._response

    def end(self, usage: UsageCount) -> bytes:
        response = self._response or self.finish(usage)
        return self._last_frames + self._event(f"response.{response['status']}", response=response)

    def error(self, exc: ApplianceError) -> bytes:
        response = {
            **self._head,
            "status": "failed",
            "error": {"code": exc.code, "message": exc.message},
            "output": self._items,
            "usage": None,
        }
        return self._event("response.failed", response=response)

    def _open_text(self) -> bytes:
        self._texts, self._item_id = [], f"msg_{uuid.uuid4().hex}"
        item = {**_message(self._item_id, ""), "status": "in_progress", "content": []}
        return self._output("response.output_item.added", item=item) + self._part(
            "response.content_part.added", part=_text_part("")
        )

    def _close_text(self) -> bytes:
        if self._texts is None:
            return b""
        text, self._texts = "".join(self._texts), None
        item = _message(self._item_id, text)
        frames = (
            self._part("response.output_text.done", text=text, logprobs=[])
            + self._part("response.content_part.done", part=_text_part(text))
            + self._output("response.output_item.done", item=item)
        )
        self._items.append(item)
        return frames

    def _call(self, call: ToolCall) -> bytes:
        item = _call_item(call)
        empty = {**item, "status": "in_progress", "arguments": ""}
        name = "response.function_call_arguments"
        frames = (
            self._output("response.output_item.added", item=empty)
            + self._output(f"{name}.delta", item_id=item["id"], delta=call.arguments)
            + self._output(
                f"{name}.done", item_id=item["id"], name=call.name, arguments=call.arguments
            )
            + self._output("response.output_item.done", item=item)
        )
        self._items.append(item)
        return frames

    def _part(self, name: str, /, **fields: Any) -> bytes:
        return self._output(name, item_id=self._item_id, content_index=0, **fields)

    def _output(self, name: str, /, **fields: Any) -> bytes:
        return self._event(name, output_index=len(self._items), **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        data = orjson.dumps({"type": name, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


def response_answer(body: ResponsesBody, choice: Piece, usage: UsageCount) -> Fields:
    items: list[Fields] = []
    if choice.text or not choice.calls:
        items.append(_message(f"msg_{uuid.uuid4().hex}", choice.text))
    items += [_call_item(call) for call in choice.calls]
    return {**_head(body), **_ending(choice.finish_reason, items, usage)}


def _text_format(body: ResponsesBody) -> Fields:
    asked = body.text.format if body.text else None
    return {"type": "text"} if asked is None else asked.model_dump(by_alias=True, exclude_none=True)


def _head(body: ResponsesBody) -> Fields:
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": _text_format(body)},
        "tool_choice": body.tool_choice or "auto",
        "tools": [{**tool.model_dump(), "strict": False} for tool in body.tools or []],
        "top_p": body.top_p,
        "truncation": "disabled",
    }


def _ending(reason: str | None, items: list[Fields], usage: UsageCount) -> Fields:
    is_cut = reason == "length"
    return {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": items,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


def _message(item_id: str, text: str) -> Fields:
    return {
        "id": item_id,
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [_text_part(text)],
    }


def _text_part(text: str) -> Fields:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(call: ToolCall) -> Fields:
    return {
        "id": f"fc_{uuid.uuid4().hex}",
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }
