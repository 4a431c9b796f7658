"""Answers in Ollama's form: one JSON object, or one a line while the answer grows."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from appliance.api.envelope import OLLAMA_PATH, error_fields
from appliance.api.reply import Piece, UsageCount
from appliance.api.tools import ToolCall
from appliance.errors import ApplianceError
from appliance.serving.types import Finished, ModelInfo

NDJSON = "application/x-ndjson"
_NS = 1_000_000_000


class OllamaFrames:
    """Lines of `/api/chat`, or with `is_chat` false of `/api/generate`."""

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self._model = model
        self._is_chat = is_chat
        self._finished: Finished | None = None

    @property
    def keep_alive(self) -> bytes:
        return self._line("")

    def start(self, num_choices: int, prompt_tokens: int) -> bytes:
        return b""

    def waiting(self, ahead: int) -> bytes:
        return b""

    def piece(self, piece: Piece) -> bytes:
        if piece.finished is not None:
            self._finished = piece.finished
        return self._line(piece.text, piece.calls) if piece.text or piece.calls else b""

    def end(self, usage: UsageCount) -> bytes:
        assert self._finished is not None, "an answer ended without its end"
        return self._line("", **end_fields(self._finished, usage))

    def error(self, exc: ApplianceError) -> bytes:
        return orjson.dumps(error_fields(exc, OLLAMA_PATH)) + b"\n"

    def _line(self, text: str, calls: Sequence[ToolCall] = (), **end: Any) -> bytes:
        fields = ollama_answer(self._model, text, calls, is_chat=self._is_chat)
        return orjson.dumps({**fields, **end}) + b"\n"


def ollama_answer(
    model: str, text: str, calls: Sequence[ToolCall] = (), *, is_chat: bool, **end: Any
) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": model, "created_at": timestamp(time.time())}
    if is_chat:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        fields["message"] = message
    else:
        fields["response"] = text
    return {**fields, "done": False, **end}


def end_fields(finished: Finished, usage: UsageCount) -> dict[str, Any]:
    until_text_s = finished.duration_s if finished.ttft_s is None else finished.ttft_s
    return {
        "done": True,
        "done_reason": finished.finish_reason,
        "total_duration": int(finished.duration_s * _NS),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": int(max(0.0, until_text_s - finished.queue_s) * _NS),
        "eval_count": usage.completion_tokens,
        "eval_duration": int(max(0.0, finished.duration_s - until_text_s) * _NS),
    }


def model_fields(model: ModelInfo) -> dict[str, Any]:
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": timestamp(model.loaded_at),
        "size": 0,
        "digest": "",
        "details": details(model),
    }


def details(model: ModelInfo) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": model.dtype,
    }


def timestamp(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


def _call(call: ToolCall) -> dict[str, Any]:
    return {"function": {"name": call.name, "arguments": orjson.loads(call.arguments)}}
