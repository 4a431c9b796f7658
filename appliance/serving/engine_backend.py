"""The in-process engine behind the gateway's protocol.

With `engine_words` and `model_store` the only modules that know `inference`. Importing it loads no
torch: what needs torch is imported on the thread that loads the model.
"""

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from django.conf import settings

from appliance.errors import BadRequest, EngineUnavailable, ModelNotFound
from appliance.serving.engine_state import engine_state, fields_of
from appliance.serving.engine_stream import EngineStream, labels_of
from appliance.serving.engine_words import (
    LOADING_RETRY_S,
    EnginePrepared,
    appliance_error,
    constraint_of,
    generation_event,
    model_info,
    sampling_params,
)
from appliance.serving.types import GenerationRequest, ModelInfo
from inference import errors as engine_errors
from inference.config import EngineConfig, InvalidConfig
from inference.model_store import ModelStore
from inference.outputs import EngineStats, Runner
from inference.request import RequestClass
from inference.scheduling.settings import check_changes
from inference.served_model import ServedModel
from inference.stats import loading_stats
from inference.supervisor import EngineSupervisor, SwapOrder

# A request that waited this long ends with an error, so that a script is not left hanging.
QUEUE_TIMEOUT_S = 600.0
_NOT_READY = {
    "loading": "The model is still loading. Try again in a moment.",
    "rebuilding": "The engine failed and is being loaded again. Try again in a minute.",
    "swapping": "The server is changing its model. Try again in a minute.",
    "hung": "The engine does not answer. Try again in a few minutes.",
    "stopping": "The server is stopping. Try again in a minute.",
}
_DEAD = "The engine has stopped working; an administrator has to look at it."
_CHANGED = "The server changed its model while this request was prepared. Send it again."


class EngineBackend:
    """Implements `backend.Backend` and `server.ServedBackend`."""

    def __init__(
        self,
        resolve_model: Callable[[Callable[[float, str], None]], Path],
        make_runner: Callable[[EngineConfig], Runner],
        *,
        config: Mapping[str, Any],
        **supervision: Any,
    ) -> None:
        """
        Args:
            resolve_model: finds, and if need be imports, the model folder; told where to report.
            make_runner: what computes the steps; tests put their faults here.
            config: fields of EngineConfig other than the model folder.
            supervision: further arguments of EngineSupervisor.
        """
        self._resolve_model = resolve_model
        self._supervisor = EngineSupervisor(make_runner, config, **supervision)
        # The model that `model` last told of, so that its folder is read once.
        self._told: tuple[ServedModel, ModelInfo] | None = None

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
                "kv_dtype": settings.APPLIANCE_KV_DTYPE,
                "num_threads": settings.APPLIANCE_THREADS or None,
                "kv_memory_bytes": megabytes * 1024 * 1024 or None,
            },
        )

    # ---- life

    def start(self) -> None:
        self._supervisor.start(self._resolve_model)

    async def stop(self, grace_s: float) -> None:
        await asyncio.to_thread(self._supervisor.stop, grace_s)

    @property
    def is_lost(self) -> bool:
        return self._supervisor.is_lost

    def swap_model(
        self,
        name: str,
        resolve: Callable[[Callable[[float, str], None]], Path],
        *,
        drain_s: float,
        on_loaded: Callable[[], None],
    ) -> None:
        order = SwapOrder(model=name, resolve=resolve, drain_s=drain_s, on_loaded=on_loaded)
        try:
            self._supervisor.ask_swap(order)
        except engine_errors.InferenceError as exc:
            raise appliance_error(exc) from exc

    # ---- the gateway's protocol

    @property
    def model(self) -> ModelInfo | None:
        served = self._supervisor.served
        if served is None:
            return None
        told = self._told
        if told is None or told[0] is not served:
            self._told = told = (served, model_info(served))
        info, context_tokens = told[1], served.engine.max_len
        if info.context_tokens != context_tokens:
            # An admin changed the limit while it runs.
            info = dataclasses.replace(info, context_tokens=context_tokens)
            self._told = (served, info)
        return info

    async def prepare(self, request: GenerationRequest) -> EnginePrepared:
        served, model = self._ready()
        if request.model is not None and request.model != model.name:
            raise ModelNotFound(
                f"There is no model {request.model[:100]!r} here; {model.name!r} is served.",
                param="model",
            )
        prompt = request.prompt if request.messages is None else request.messages
        if prompt is None:
            raise BadRequest("The request has neither messages nor a prompt.", param="messages")
        params = sampling_params(request.options)
        try:
            if request.form is not None:
                params = dataclasses.replace(params, constraint=constraint_of(request.form))
            prepared = await served.generator.prepare(
                prompt,
                params,
                server_prompt=request.server_prompt,
                tools=request.tools or None,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                answer_start=request.answer_start,
            )
        except engine_errors.InferenceError as exc:
            raise appliance_error(exc) from exc
        return EnginePrepared(request, params, prepared, served)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        served, model = self._ready()
        for token_id in token_ids:
            if not 0 <= token_id < model.vocab_size:
                raise BadRequest(
                    f"There is no token {token_id}; 0 to {model.vocab_size - 1} is allowed.",
                    param="tokens",
                )
        return await asyncio.to_thread(served.tokenizer.decode, token_ids, show_special=True)

    async def generate(self, prepared: EnginePrepared) -> EngineStream:
        served = prepared.served
        if served is not self._supervisor.served:
            # Its ids mean nothing to another model.
            self._ready()
            raise EngineUnavailable(_CHANGED, retry_after_s=LOADING_RETRY_S)
        request, caller = prepared.request, prepared.request.caller
        owner = f"user:{caller.user_id}"
        request_id = f"r-{uuid.uuid4().hex[:16]}"
        try:
            stream = served.generator.stream(
                prepared.prompt,
                prepared.params,
                request_id=request_id,
                owner=owner,
                # Never from the body: a caller must not reach another user's cached prefixes.
                cache_scope=owner,
                request_class=RequestClass(request.generation_class),
                labels=labels_of(caller),
                queue_deadline_s=time.monotonic() + QUEUE_TIMEOUT_S,
            )
        except engine_errors.InferenceError as exc:
            raise appliance_error(exc) from exc
        return EngineStream(stream, lambda: served.engine.abort(request_id), generation_event)

    def _ready(self) -> tuple[ServedModel, ModelInfo]:
        """What serves now. Raises EngineUnavailable while nothing does."""
        served = self._supervisor.served
        model = self.model
        if served is None or model is None:
            phase = self._supervisor.phase.name
            text = _NOT_READY.get(phase, _DEAD)
            raise EngineUnavailable(text, retry_after_s=LOADING_RETRY_S)
        return served, model

    def abort(self, request_id: str, reason: str = "abort") -> bool:
        engine = self._supervisor.engine
        if engine is None:
            return False
        return engine.abort(request_id, detail=None if reason == "abort" else reason)

    def live_labels(self) -> Sequence[Mapping[str, str]]:
        engine = self._supervisor.engine
        return [] if engine is None else engine.live_labels()

    def state(self) -> Mapping[str, Any]:
        model, swap = self.model, self._supervisor.swap
        return {
            **engine_state(self._stats(), None if model is None else fields_of(model)),
            "swap": None if swap is None else fields_of(swap),
        }

    def block_map(self) -> Mapping[str, Any]:
        engine = self._supervisor.engine
        if engine is None:
            return {"step": 0, "cells": [], "holders": [], "partial": {}, "token_start": {}}
        found = fields_of(engine.block_map())
        return {"step": found.pop("step_id"), **found}

    def events_since(self, event_id: int) -> Sequence[Mapping[str, Any]]:
        return [fields_of(event) for event in self._supervisor.events.since(event_id)]

    def tune(self, changes: Mapping[str, Any]) -> None:
        for name, value in changes.items():
            try:
                check_changes({name: value})
            except InvalidConfig as exc:
                raise BadRequest(str(exc), param=name) from exc
        self._supervisor.tune(changes)

    def _stats(self) -> EngineStats:
        phase, engine = self._supervisor.phase, self._supervisor.engine
        state = "draining" if phase.name == "stopping" else phase.name
        if engine is None or state in ("dead", "hung"):
            progress = (0.0, "") if state == "dead" else phase.progress
            return loading_stats(state, progress, phase.error)
        stats = engine.stats()
        # While it loads, the engine itself knows best how far it is.
        progress = stats.progress if stats.state == "loading" else phase.progress
        return dataclasses.replace(stats, state=state, progress=progress, error=phase.error)


def _model_runner(config: EngineConfig) -> Runner:
    # The first import that brings torch.
    from inference.runner.model_runner import ModelRunner

    return ModelRunner(config)
