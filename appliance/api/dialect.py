"""Answers in OpenAI's two forms, chat and completion: whole, or as frames of a stream.

A frame of text is joined from bytes made once a stream and the JSON of the new text alone: at
hundreds of tokens a second, building a dict for each costs more than everything else here.
"""

import math
import time
import uuid
from collections.abc import Sequence
from typing import Any

import orjson

from appliance.api.envelope import error_fields
from appliance.api.reply import Piece, UsageCount
from appliance.api.sse import CommentedFrames
from appliance.api.tools import ToolCall
from appliance.errors import ApplianceError

# JSON has no -Infinity; this is what OpenAI sends for "impossible".
_LEAST_LOGPROB = -9999.0
# Ends of an answer that is whole; after the others comes an error.
WHOLE_ENDS = ("stop", "length", "tool_calls")


class OpenAiFrames(CommentedFrames):
    """What the streams of both forms have in common."""

    include_usage: bool
    _head: bytes

    def end(self, usage: UsageCount) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self.include_usage:
            return done
        fields = orjson.dumps(usage.as_openai())
        return self._head + b',"choices":[],"usage":' + fields + b"}\n\n" + done

    def error(self, exc: ApplianceError) -> bytes:
        return b"data: " + orjson.dumps(error_fields(exc)) + b"\n\n"


class ChatFrames(OpenAiFrames):
    """`chat.completion.chunk`; holds logprobs back until there is text to send them with."""

    def __init__(self, model: str, *, logprobs: bool = False, include_usage: bool = False) -> None:
        self.include_usage = include_usage
        head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        # {"id":…,"model":"…"  and then what differs
        self._head = b"data: " + orjson.dumps(head)[:-1]
        self._heads: list[bytes] = []
        self._logprobs = logprobs
        self._held: dict[int, list[Any]] = {}
        self._num_calls: dict[int, int] = {}

    def start(self, num_choices: int, prompt_tokens: int) -> bytes:
        self._heads = [
            self._head + b',"choices":[{"index":%d,"delta":{' % index
            for index in range(num_choices)
        ]
        return b"".join(
            [
                head + b'"role":"assistant"},"logprobs":null,"finish_reason":null}]}\n\n'
                for head in self._heads
            ]
        )

    def piece(self, piece: Piece) -> bytes:
        head = self._heads[piece.index]
        frame = b""
        if self._logprobs:
            self._held.setdefault(piece.index, []).extend(piece.logprobs)
        if piece.text:
            frame = (
                head
                + b'"content":'
                + orjson.dumps(piece.text)
                + b'},"logprobs":'
                + self._take_logprobs(piece.index)
                + b',"finish_reason":null}]}\n\n'
            )
        for call in piece.calls:
            number = self._num_calls.get(piece.index, 0)
            self._num_calls[piece.index] = number + 1
            fields = orjson.dumps([{"index": number, **call_fields(call)}])
            frame += (
                head + b'"tool_calls":' + fields + b'},"logprobs":null,"finish_reason":null}]}\n\n'
            )
        if (reason := piece.finish_reason) in WHOLE_ENDS:
            frame += (
                head
                + b'},"logprobs":'
                + self._take_logprobs(piece.index)
                + b',"finish_reason":"%s"}]}\n\n' % reason.encode()
            )
        return frame

    def _take_logprobs(self, index: int) -> bytes:
        held = self._held.pop(index, None)
        return orjson.dumps(chat_logprobs(held)) if held else b"null"


def chat_answer(
    model: str, choices: Sequence[Piece], usage: UsageCount, *, logprobs: bool
) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": choice.index,
                "message": _chat_message(choice),
                "logprobs": chat_logprobs(choice.logprobs) if logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for choice in choices
        ],
        "usage": usage.as_openai(),
    }


def _chat_message(choice: Piece) -> dict[str, Any]:
    message = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [call_fields(call) for call in choice.calls]
    return message


def call_fields(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def chat_logprobs(tokens: Sequence[Any]) -> dict[str, Any]:
    return {
        "content": [
            {**_token(*chosen), "top_logprobs": [_token(*other) for other in others]}
            for *chosen, others in tokens
        ],
        "refusal": None,
    }


def _token(text: str, raw: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB


# ---- completions


class CompletionFrames(OpenAiFrames):
    """`text_completion` chunks; `echoes` are the prompts to repeat, one a choice."""

    def __init__(
        self,
        model: str,
        *,
        logprobs: bool = False,
        include_usage: bool = False,
        echoes: Sequence[str] = (),
    ) -> None:
        self.include_usage = include_usage
        head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._head = b"data: " + orjson.dumps(head)[:-1]
        self._logprobs = logprobs
        self._echoes = echoes
        self._held: dict[int, list[Any]] = {}
        self._offsets: dict[int, int] = {}

    def start(self, num_choices: int, prompt_tokens: int) -> bytes:
        return b"".join([self._frame(at, echo, None) for at, echo in enumerate(self._echoes)])

    def piece(self, piece: Piece) -> bytes:
        if self._logprobs:
            self._held.setdefault(piece.index, []).extend(piece.logprobs)
        frame = self._frame(piece.index, piece.text, None) if piece.text else b""
        if piece.finished is not None and piece.finished.finish_reason in ("stop", "length"):
            frame += self._frame(piece.index, "", piece.finished.finish_reason)
        return frame

    def _frame(self, index: int, text: str, finish_reason: str | None) -> bytes:
        held = self._held.pop(index, None)
        logprobs = None
        if held:
            offset = self._offsets.get(index, 0)
            logprobs = completion_logprobs(held, offset)
            self._offsets[index] = offset + sum(len(token[0]) for token in held)
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._head + b',"choices":[' + orjson.dumps(choice) + b"]}\n\n"


def completion_answer(
    model: str,
    choices: Sequence[Piece],
    usage: UsageCount,
    *,
    logprobs: bool,
    echoes: Sequence[str] = (),
) -> dict[str, Any]:
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": choice.index,
                "text": (echoes[choice.index] if echoes else "") + choice.text,
                "logprobs": completion_logprobs(choice.logprobs, 0) if logprobs else None,
                "finish_reason": choice.finished.finish_reason if choice.finished else None,
            }
            for choice in choices
        ],
        "usage": usage.as_openai(),
    }


def completion_logprobs(tokens: Sequence[Any], offset: int) -> dict[str, Any]:
    """The older form: four lists, one entry a token in each. `offset` counts letters."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token[0])
    return {
        "tokens": [token[0] for token in tokens],
        "token_logprobs": [_finite(token[2]) for token in tokens],
        "top_logprobs": [
            {other[0]: _finite(other[2]) for other in token[3]} if token[3] else None
            for token in tokens
        ],
        "text_offset": offsets,
    }
