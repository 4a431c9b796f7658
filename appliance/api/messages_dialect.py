"""Answers in Anthropic's form: a message of blocks, whole or as named events."""

import uuid
from collections.abc import Sequence
from typing import Any

import orjson

from appliance.api.envelope import MESSAGES_PATH, error_fields
from appliance.api.reply import Piece, UsageCount
from appliance.api.sse import CommentedFrames
from appliance.api.tools import ToolCall
from appliance.errors import ApplianceError
from appliance.serving.types import Finished


class MessageFrames(CommentedFrames):
    """One block is open at a time: text, or a call of a tool."""

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, model: str, stop: Sequence[str]) -> None:
        self._model = model
        self._stop = stop
        self._index = 0
        self._is_open = False
        self._last: Piece | None = None

    def start(self, num_choices: int, prompt_tokens: int) -> bytes:
        usage = UsageCount(prompt_tokens=prompt_tokens, cached_tokens=0, completion_tokens=0)
        message = {
            **_head(self._model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_fields(usage),
        }
        return _event("message_start", message=message) + self.keep_alive

    def piece(self, piece: Piece) -> bytes:
        frames = b""
        if piece.text:
            if not self._is_open:
                frames += self._block({"type": "text", "text": ""})
            frames += self._delta({"type": "text_delta", "text": piece.text})
        for call in piece.calls:
            frames += self._close()
            frames += self._block({**_call(call), "input": {}})
            frames += self._delta({"type": "input_json_delta", "partial_json": call.arguments})
            frames += self._close()
        if piece.finished is not None:
            self._last = piece
        return frames

    def end(self, usage: UsageCount) -> bytes:
        assert self._last is not None, "an answer ended without its last piece"
        return (
            self._close()
            + _event(
                "message_delta",
                delta=stop_fields(self._last, self._stop),
                usage=usage_fields(usage),
            )
            + _event("message_stop")
        )

    def error(self, exc: ApplianceError) -> bytes:
        return b"event: error\ndata: " + orjson.dumps(error_fields(exc, MESSAGES_PATH)) + b"\n\n"

    def _block(self, block: dict[str, Any]) -> bytes:
        self._is_open = True
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        self._index += 1
        return _event("content_block_stop", index=self._index - 1)


def message_answer(
    model: str, choice: Piece, usage: UsageCount, stop: Sequence[str]
) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    if choice.text or not choice.calls:
        content.append({"type": "text", "text": choice.text})
    for call in choice.calls:
        content.append({**_call(call), "input": orjson.loads(call.arguments)})
    return {
        **_head(model),
        "content": content,
        **stop_fields(choice, stop),
        "usage": usage_fields(usage),
    }


def usage_fields(usage: UsageCount) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def stop_fields(choice: Piece, stop: Sequence[str]) -> dict[str, Any]:
    finished = choice.finished
    assert finished is not None, "an answer ended without its end"
    return {"stop_reason": _reason(choice, finished, stop), "stop_sequence": _stop(finished, stop)}


def _reason(choice: Piece, finished: Finished, stop: Sequence[str]) -> str:
    if choice.finish_reason == "tool_calls":
        return "tool_use"
    if finished.finish_reason == "length":
        return "max_tokens"
    return "end_turn" if _stop(finished, stop) is None else "stop_sequence"


def _stop(finished: Finished, stop: Sequence[str]) -> str | None:
    return finished.stop if finished.stop in stop else None


def _head(model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
    }


def _call(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _event(name: str, /, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), orjson.dumps({"type": name, **fields}))
