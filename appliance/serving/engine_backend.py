"""The in-process engine behind the gateway's protocol; the only module that knows `inference`.

Importing it loads no torch: what needs torch is imported on the thread that loads the model.
"""

import asyncio
import dataclasses
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from django.conf import settings

from appliance.errors import (
    ApplianceError,
    BadRequest,
    ContextLengthExceeded,
    EngineUnavailable,
    GenerationFailed,
    ModelNotFound,
    QueueIsFull,
)
from appliance.serving.engine_state import engine_state, fields_of
from appliance.serving.engine_stream import EngineStream
from appliance.serving.tool_format import tool_format_of
from appliance.serving.types import (
    Delta,
    Finished,
    GenerationEvent,
    GenerationRequest,
    ModelInfo,
    Queued,
    Reading,
    SamplingOptions,
)
from inference import errors as engine_errors
from inference.config import EngineConfig, InvalidConfig
from inference.engine import Engine
from inference.generator import PreparedPrompt, TextGenerator
from inference.model_store import ModelStore, ModelStoreError
from inference.outputs import (
    EngineStats,
    PromptProgress,
    QueueUpdate,
    Runner,
    TextDelta,
    TextEvent,
)
from inference.request import RequestClass
from inference.sampling_params import SamplingParams
from inference.scheduling.settings import check_changes
from inference.stats import loading_stats
from inference.text.chat_template import ChatTemplate
from inference.text.tokenizer import Tokenizer, read_template_source

logger = logging.getLogger(__name__)

# A request that waited this long ends with an error, so that a script is not left hanging.
QUEUE_TIMEOUT_S = 600.0
_LOADING = "The model is still loading. Try again in a moment."
_LOADING_RETRY_S = 5.0

# Engine error -> ours. The nearest class above an error that stands here decides.
_ERRORS: Mapping[type[engine_errors.InferenceError], Callable[..., ApplianceError]] = {
    engine_errors.InferenceError: GenerationFailed,
    engine_errors.RequestRejected: BadRequest,
    engine_errors.PromptTooLong: ContextLengthExceeded,
    engine_errors.InvalidSamplingParams: BadRequest,
    engine_errors.InvalidPrompt: BadRequest,
    engine_errors.QueueFull: QueueIsFull,
    engine_errors.EngineStopping: EngineUnavailable,
    engine_errors.RequestFailed: GenerationFailed,
    engine_errors.EngineDead: EngineUnavailable,
    engine_errors.ModelLoadError: EngineUnavailable,
    engine_errors.UnsupportedArchitecture: EngineUnavailable,
    engine_errors.MissingWeights: EngineUnavailable,
    engine_errors.NotEnoughMemory: EngineUnavailable,
    InvalidConfig: BadRequest,
    ModelStoreError: EngineUnavailable,
}


def appliance_error(exc: engine_errors.InferenceError) -> ApplianceError:
    """The same fault as people and scripts see it."""
    kind = next(kind for kind in type(exc).__mro__ if kind in _ERRORS)
    retry_after_s = getattr(exc, "retry_after_s", None)
    if isinstance(exc, engine_errors.EngineStopping):
        retry_after_s = _LOADING_RETRY_S
    return _ERRORS[kind](str(exc), param=getattr(exc, "param", None), retry_after_s=retry_after_s)


# ---- one generation


@dataclasses.dataclass(frozen=True, slots=True)
class EnginePrepared:
    request: GenerationRequest
    params: SamplingParams
    prompt: PreparedPrompt

    @property
    def prompt_tokens(self) -> int:
        return self.prompt.num_prompt_tokens

    @property
    def token_ids(self) -> Sequence[int]:
        return self.prompt.token_ids

    @property
    def max_completion_tokens(self) -> int:
        return self.prompt.max_new_tokens


def _event(event: TextEvent) -> GenerationEvent:
    if isinstance(event, QueueUpdate):
        return Queued(event.ahead, event.estimated_wait_s)
    if isinstance(event, PromptProgress):
        return Reading(event.num_computed_tokens, event.num_prompt_tokens, event.num_cached_tokens)
    if isinstance(event, TextDelta):
        logprobs = tuple((e.token, e.token_bytes, e.logprob, tuple(e.top)) for e in event.logprobs)
        return Delta(event.text, event.num_tokens, logprobs)
    reason = event.finish_reason.value
    return Finished(
        finish_reason=reason,
        # A prompt that was never read is not charged.
        prompt_tokens=event.num_prompt_tokens if event.has_started else 0,
        cached_tokens=event.num_cached_tokens if event.has_started else 0,
        completion_tokens=event.num_completion_tokens,
        queue_s=event.queue_s,
        ttft_s=event.ttft_s,
        duration_s=event.duration_s,
        # For an abort: the words of who ended it, if there are any.
        error=event.detail if reason in ("error", "abort") else None,
        stop=event.detail if reason == "stop" else None,
        error_code="engine_unavailable" if reason == "error" and not event.has_started else None,
    )


def _params(options: SamplingOptions) -> SamplingParams:
    given = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if getattr(options, field.name) is not None
    }
    return SamplingParams(**given)


# ---- the back end


class EngineBackend:
    """Implements `backend.Backend` and `server.ServedBackend`."""

    def __init__(
        self,
        resolve_model: Callable[[Callable[[float, str], None]], Path],
        make_runner: Callable[[EngineConfig], Runner],
        *,
        config: Mapping[str, Any],
    ) -> None:
        """Args:
        resolve_model: finds, and if need be imports, the model folder; told where to report.
        config: fields of EngineConfig other than the model folder.
        """
        self._resolve_model = resolve_model
        self._make_runner = make_runner
        self._config = config
        # Live settings that were chosen before there was an engine to give them to.
        self._early_changes: dict[str, Any] = {}
        self._lock = threading.Lock()
        # Set once, by the loading thread.
        self._engine: Engine | None = None
        self._tokenizer: Tokenizer | None = None
        self._generator: TextGenerator | None = None
        self._model: ModelInfo | None = None
        self._is_stopping = False
        self._progress = (0.0, "finding the model")
        self._error: str | None = None

    @classmethod
    def from_settings(cls) -> "EngineBackend":
        store = ModelStore(settings.MODELS_DIR)
        megabytes = settings.APPLIANCE_KV_MEMORY_MB
        return cls(
            lambda report: store.resolve(settings.APPLIANCE_MODEL, report),
            _model_runner,
            config={
                "device": settings.APPLIANCE_DEVICE,
                "dtype": settings.APPLIANCE_DTYPE,
                "num_threads": settings.APPLIANCE_THREADS or None,
                "kv_memory_bytes": megabytes * 1024 * 1024 or None,
            },
        )

    # ---- life

    def start(self) -> None:
        threading.Thread(target=self._load, name="model-load", daemon=True).start()

    async def stop(self, grace_s: float) -> None:
        with self._lock:
            self._is_stopping = True
            engine = self._engine
        if engine is not None:
            grace_s = grace_s if self._model is not None else 0.0
            await asyncio.to_thread(engine.shutdown, grace_s)

    def _load(self) -> None:
        """The loading thread: an edge, since an error that nobody sees would load for ever."""
        try:
            model_dir = self._resolve_model(self._report)
            config = EngineConfig(model_dir=model_dir, **self._config)
            self._report(0.0, "starting the engine")
            engine = Engine(config, self._make_runner(config))
            with self._lock:
                if self._is_stopping:
                    return
                self._engine = engine
                if self._early_changes:
                    engine.tune(**self._early_changes)
            engine.start()
            tokenizer = Tokenizer.from_dir(model_dir)
            generator = TextGenerator(
                engine, tokenizer, ChatTemplate.from_dir(model_dir, tokenizer)
            )
            engine.wait_ready(threading.TIMEOUT_MAX)
            self._tokenizer = tokenizer
            self._generator, self._model = generator, _model_info(engine, model_dir)
        except (engine_errors.InferenceError, OSError) as exc:
            if not self._is_stopping:
                self._error = str(exc)
                logger.error("the model cannot be served: %s", exc)
        except Exception as exc:
            self._error = f"{type(exc).__name__}: {exc}"
            logger.exception("the model cannot be served")

    def _report(self, share: float, doing: str) -> None:
        self._progress = (share, doing)

    # ---- the gateway's protocol

    @property
    def model(self) -> ModelInfo | None:
        return self._model if self._error is None else None

    async def prepare(self, request: GenerationRequest) -> EnginePrepared:
        generator, model = self._generator, self.model
        if generator is None or model is None:
            raise self._not_ready()
        if request.model is not None and request.model != model.name:
            raise ModelNotFound(
                f"There is no model {request.model[:100]!r} here; {model.name!r} is served.",
                param="model",
            )
        prompt = request.prompt if request.messages is None else request.messages
        if prompt is None:
            raise BadRequest("The request has neither messages nor a prompt.", param="messages")
        params = _params(request.options)
        try:
            prepared = await generator.prepare(prompt, params, tools=request.tools or None)
        except engine_errors.InferenceError as exc:
            raise appliance_error(exc) from exc
        if request.answer_start:
            prepared = self._begun(prepared, request.answer_start, model.context_tokens)
        return EnginePrepared(request, params, prepared)

    def _begun(self, prompt: PreparedPrompt, start: str, context_tokens: int) -> PreparedPrompt:
        """The prompt with the beginning of its answer."""
        assert self._tokenizer is not None, "prepared without a tokenizer"
        token_ids = [*prompt.token_ids, *self._tokenizer.encode(start, allow_special=True)]
        room = context_tokens - len(token_ids)
        if room < 1:
            raise ContextLengthExceeded(
                f"The prompt has {len(token_ids)} tokens; with an answer, {context_tokens} fit.",
                param="messages",
            )
        max_new_tokens = min(prompt.max_new_tokens, room)
        return dataclasses.replace(prompt, token_ids=token_ids, max_new_tokens=max_new_tokens)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        tokenizer, model = self._tokenizer, self.model
        if tokenizer is None or model is None:
            raise self._not_ready()
        for token_id in token_ids:
            if not 0 <= token_id < model.vocab_size:
                raise BadRequest(
                    f"There is no token {token_id}; 0 to {model.vocab_size - 1} is allowed.",
                    param="tokens",
                )
        return await asyncio.to_thread(tokenizer.decode, token_ids, show_special=True)

    async def generate(self, prepared: EnginePrepared) -> EngineStream:
        generator, engine = self._generator, self._engine
        assert generator is not None, "prepared without an engine"
        assert engine is not None, "prepared without an engine"
        request, caller = prepared.request, prepared.request.caller
        owner = f"user:{caller.user_id}"
        request_id = f"r-{uuid.uuid4().hex[:16]}"
        try:
            stream = generator.stream(
                prepared.prompt,
                prepared.params,
                request_id=request_id,
                owner=owner,
                # Never from the body: a caller must not reach another user's cached prefixes.
                cache_scope=owner,
                request_class=RequestClass(request.generation_class),
                labels={
                    "username": caller.username,
                    "user_id": str(caller.user_id),
                    "source": caller.source,
                    "key_prefix": caller.key_prefix or "",
                },
                queue_deadline_s=time.monotonic() + QUEUE_TIMEOUT_S,
            )
        except engine_errors.InferenceError as exc:
            raise appliance_error(exc) from exc
        return EngineStream(stream, lambda: engine.abort(request_id), _event)

    def _not_ready(self) -> EngineUnavailable:
        return EngineUnavailable(
            _LOADING if self._error is None else "The model could not be loaded.",
            retry_after_s=_LOADING_RETRY_S,
        )

    def abort(self, request_id: str, reason: str = "abort") -> bool:
        engine = self._engine
        if engine is None:
            return False
        return engine.abort(request_id, detail=None if reason == "abort" else reason)

    def state(self) -> Mapping[str, Any]:
        model = self.model
        return engine_state(self._stats(), None if model is None else fields_of(model))

    def block_map(self) -> Mapping[str, Any]:
        engine = self._engine
        if engine is None:
            return {"step": 0, "cells": [], "holders": [], "partial": {}, "token_start": {}}
        found = fields_of(engine.block_map())
        return {"step": found.pop("step_id"), **found}

    def events_since(self, event_id: int) -> Sequence[Mapping[str, Any]]:
        engine = self._engine
        return [] if engine is None else [fields_of(e) for e in engine.events_since(event_id)]

    def tune(self, changes: Mapping[str, Any]) -> None:
        for name, value in changes.items():
            try:
                check_changes({name: value})
            except InvalidConfig as exc:
                raise BadRequest(str(exc), param=name) from exc
        with self._lock:
            if self._engine is None:
                self._early_changes.update(changes)
                return
        self._engine.tune(**changes)

    def _stats(self) -> EngineStats:
        engine = self._engine
        if self._error is not None:
            return loading_stats("dead", (0.0, ""), self._error)
        if self._is_stopping and self._model is None:
            return loading_stats("draining", (0.0, ""), None)
        if engine is None:
            return loading_stats("loading", self._progress, None)
        stats = engine.stats()
        if stats.state == "ready" and self._model is None:
            return dataclasses.replace(stats, state="loading")
        return stats


def _model_runner(config: EngineConfig) -> Runner:
    # The first import that brings torch.
    from inference.runner.model_runner import ModelRunner

    return ModelRunner(config)


def _model_info(engine: Engine, model_dir: Path) -> ModelInfo:
    info = engine.info
    return ModelInfo(
        name=info.model_name,
        context_tokens=engine.max_len,
        vocab_size=info.vocab_size,
        device=info.device,
        dtype=info.dtype,
        backend=info.backend,
        loaded_at=int(time.time()),
        notice=info.notice,
        tool_format=tool_format_of(read_template_source(model_dir) or ""),
    )
