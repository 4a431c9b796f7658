"""A scripted back end: the words are fixed, so tests of the web layer can assert every event.

`hold()` lets tests stop the stream at a known place: after `n` deltas the stream waits for
`release()`. Nothing here sleeps.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from appliance.errors import BadRequest, ContextLengthExceeded, EngineUnavailable
from appliance.serving.engine_stream import labels_of
from appliance.serving.types import (
    Delta,
    ErrorCode,
    Finished,
    GenerationEvent,
    GenerationRequest,
    ModelInfo,
    Queued,
    Reading,
)
from tests.appliance.scripted_stream import ScriptedStream

MODEL = ModelInfo(
    name="scripted",
    context_tokens=1000,
    vocab_size=100,
    device="none",
    dtype="none",
    backend="scripted",
    loaded_at=1_700_000_000,
    tool_format="hermes",
)


@dataclass
class FakePrepared:
    request: GenerationRequest
    prompt_tokens: int
    max_completion_tokens: int

    @property
    def token_ids(self) -> Sequence[int]:
        return range(self.prompt_tokens)


@dataclass
class FakeStream(ScriptedStream):
    backend: "FakeBackend"
    request: GenerationRequest
    request_id: str
    prompt_tokens: int
    limit: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    closed: bool = False
    aborted_because: str | None = None

    @property
    def most_at_once(self) -> int:
        return self.backend.events_at_once

    async def events(self) -> AsyncIterator[GenerationEvent]:
        backend = self.backend
        if backend.queued_ahead:
            yield Queued(ahead=backend.queued_ahead, estimated_wait_s=2.0)
        if backend.refuse_waiting:
            if backend.hold_after == 0:
                backend.holding.set()
                await backend.released.wait()
            self.backend.running.pop(self.request_id, None)
            yield self._refused()
            return
        yield Reading(self.prompt_tokens, self.prompt_tokens, self.cached_tokens)
        reason = "stop"
        error = None
        for number, word in enumerate(backend.words):
            if backend.hold_after is not None and number >= backend.hold_after:
                backend.holding.set()
                await backend.released.wait()
            if self.closed or self.aborted_because:
                reason = "abort"
                break
            if backend.fail_after is not None and number >= backend.fail_after:
                reason, error = "error", "The model stopped working."
                break
            if number >= self.limit:
                reason = "length"
                break
            self.completion_tokens += 1
            asked = backend.logprobs is not None and self.request.options.logprobs is not None
            yield Delta(word, self.completion_tokens, (backend.logprobs,) if asked else ())
        self.backend.running.pop(self.request_id, None)
        yield Finished(
            finish_reason=reason,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            queue_s=0.0,
            ttft_s=0.1 if self.completion_tokens else None,
            duration_s=0.5,
            error=error,
            stop=backend.stop_found if reason == "stop" else None,
            error_code=backend.fail_code if error else None,
        )

    def _refused(self) -> Finished:
        return Finished(
            finish_reason="error",
            prompt_tokens=self.prompt_tokens,
            cached_tokens=0,
            completion_tokens=0,
            queue_s=0.5,
            ttft_s=None,
            duration_s=0.5,
            error="The server is stopping. Try again in a moment.",
            error_code="engine_unavailable",
        )

    async def aclose(self) -> None:
        self.closed = True
        self.backend.running.pop(self.request_id, None)
        await super().aclose()


@dataclass
class FakeBackend:
    """Implements `appliance.serving.backend.Backend`. A prompt costs a token a word."""

    words: Sequence[str] = ("Paris", " is", " the", " capital", ".")
    # Events that are ready together, as when a reader was busy meanwhile.
    events_at_once: int = 1
    queued_ahead: int = 0
    hold_after: int | None = None
    fail_after: int | None = None
    # What such a failure says that it is.
    fail_code: ErrorCode | None = None
    # Whether requests end in the queue, as at a stop of the server.
    refuse_waiting: bool = False
    down: bool = False
    # The stop string that ends every answer.
    stop_found: str | None = None
    # What every token carries when logprobs are asked for; see `types.Delta`.
    logprobs: Any = None
    settings: dict[str, Any] = field(default_factory=lambda: {"slots": 4})
    running: dict[str, FakeStream] = field(default_factory=dict)
    requests: list[GenerationRequest] = field(default_factory=list)
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    def hold(self, after: int) -> None:
        self.hold_after = after

    def release(self) -> None:
        self.hold_after = None
        self.released.set()

    @property
    def is_lost(self) -> bool:
        return False

    @property
    def model(self) -> ModelInfo | None:
        return None if self.down else MODEL

    async def prepare(self, request: GenerationRequest) -> FakePrepared:
        if self.down:
            raise EngineUnavailable("The model is loading. Try again in a moment.")
        if request.messages is not None:
            text = " ".join(str(m.get("content") or "") for m in request.messages)
            text += " " + (request.server_prompt or "")
        else:
            text = str(request.prompt)
        prompt_tokens = len(text.split())
        left = MODEL.context_tokens - prompt_tokens
        if left < 1:
            raise ContextLengthExceeded(
                f"The prompt has {prompt_tokens} tokens; at most {MODEL.context_tokens - 1} fit.",
                param="messages",
            )
        wanted = request.options.max_tokens or left
        return FakePrepared(request, prompt_tokens, min(wanted, left))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        if any(not 0 <= token_id < MODEL.vocab_size for token_id in token_ids):
            raise BadRequest("There is no such token.", param="tokens")
        return " ".join(f"w{token_id}" for token_id in token_ids)

    async def generate(self, prepared: FakePrepared) -> FakeStream:
        self.requests.append(prepared.request)
        stream = FakeStream(
            backend=self,
            request=prepared.request,
            request_id=f"r-{len(self.requests)}",
            prompt_tokens=prepared.prompt_tokens,
            limit=prepared.max_completion_tokens,
        )
        self.running[stream.request_id] = stream
        return stream

    def abort(self, request_id: str, reason: str = "abort") -> bool:
        stream = self.running.get(request_id)
        if stream is None:
            return False
        stream.aborted_because = reason
        return True

    def live_labels(self) -> Sequence[Mapping[str, str]]:
        return [labels_of(stream.request.caller) for stream in self.running.values()]

    def state(self) -> Mapping[str, Any]:
        return {
            "state": "ready",
            "slots": {
                "requested": self.settings["slots"],
                "effective": self.settings["slots"],
                "reason": "",
            },
            "running": len(self.running),
            "waiting": 0,
            "kv": {
                "block_size": 16,
                "bytes_per_block": 1024,
                "blocks_total": 64,
                "blocks_used": len(self.running),
                "blocks_cached": 0,
                "blocks_free": 64 - len(self.running),
                "blocks_shared": 0,
                "slots_wasted": 0,
            },
            "requests": [],
        }

    def block_map(self) -> Mapping[str, Any]:
        return {"step": 0, "cells": [-1] * 64, "holders": [], "partial": {}, "token_start": {}}

    def events_since(self, event_id: int) -> Sequence[Mapping[str, Any]]:
        return []

    def tune(self, changes: Mapping[str, Any]) -> None:
        for name, value in changes.items():
            if name != "slots" or not isinstance(value, int) or not 1 <= value <= 4096:
                raise BadRequest(f"{name} is {value!r}; slots from 1 to 4096 is allowed.")
            self.settings[name] = value
