"""Between the engine's words and the product's: errors, events, parameters, the loaded model."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from appliance.errors import (
    ApplianceError,
    BadRequest,
    Conflict,
    ContextLengthExceeded,
    EngineUnavailable,
    GenerationFailed,
    QueueIsFull,
)
from appliance.serving.tool_format import tool_format_of
from appliance.serving.types import (
    AnswerForm,
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
from inference.config import InvalidConfig
from inference.generator import PreparedPrompt
from inference.grammar.constraint import Constraint
from inference.model_store import ModelStoreError
from inference.outputs import PromptProgress, QueueUpdate, TextDelta, TextEvent
from inference.sampling_params import SamplingParams
from inference.served_model import ServedModel
from inference.text.tokenizer import read_template_source

LOADING_RETRY_S = 5.0

# Engine error -> ours. The nearest class above an error that stands here decides.
_ERRORS: Mapping[type[engine_errors.InferenceError], Callable[..., ApplianceError]] = {
    engine_errors.InferenceError: GenerationFailed,
    engine_errors.RequestRejected: BadRequest,
    engine_errors.PromptTooLong: ContextLengthExceeded,
    engine_errors.InvalidSamplingParams: BadRequest,
    engine_errors.InvalidConstraint: BadRequest,
    engine_errors.InvalidPrompt: BadRequest,
    engine_errors.QueueFull: QueueIsFull,
    engine_errors.EngineStopping: EngineUnavailable,
    engine_errors.RequestFailed: GenerationFailed,
    engine_errors.EngineDead: EngineUnavailable,
    engine_errors.SwapRefused: Conflict,
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
    if isinstance(exc, engine_errors.EngineStopping | engine_errors.EngineDead):
        retry_after_s = LOADING_RETRY_S
    return _ERRORS[kind](str(exc), param=getattr(exc, "param", None), retry_after_s=retry_after_s)


@dataclasses.dataclass(frozen=True, slots=True)
class EnginePrepared:
    request: GenerationRequest
    params: SamplingParams
    prompt: PreparedPrompt
    # The model whose ids these are; no other may get them.
    served: ServedModel

    @property
    def prompt_tokens(self) -> int:
        return self.prompt.num_prompt_tokens

    @property
    def token_ids(self) -> Sequence[int]:
        return self.prompt.token_ids

    @property
    def max_completion_tokens(self) -> int:
        return self.prompt.max_new_tokens


def generation_event(event: TextEvent) -> GenerationEvent:
    if isinstance(event, QueueUpdate):
        return Queued(event.ahead, event.estimated_wait_s)
    if isinstance(event, PromptProgress):
        return Reading(event.num_computed_tokens, event.num_prompt_tokens, event.num_cached_tokens)
    if isinstance(event, TextDelta):
        logprobs = tuple((e.token, e.token_bytes, e.logprob, tuple(e.top)) for e in event.logprobs)
        return Delta(event.text, event.num_tokens, logprobs)
    reason, code = event.finish_reason.value, None
    if reason == "refused":
        reason, code = "error", BadRequest.code
    elif reason == "error" and not event.has_started:
        code = EngineUnavailable.code
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
        error_code=code,
    )


def sampling_params(options: SamplingOptions) -> SamplingParams:
    given = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if getattr(options, field.name) is not None
    }
    return SamplingParams(**given)


def constraint_of(form: AnswerForm) -> Constraint:
    """Raises InvalidConstraint: it is no JSON."""
    if isinstance(form.source, str) and form.kind != "pieces":
        return Constraint(form.kind, form.source, form.param)
    return Constraint.of_json(form.kind, form.source, param=form.param)


def model_info(served: ServedModel) -> ModelInfo:
    engine, info = served.engine, served.engine.info
    return ModelInfo(
        name=info.model_name,
        context_tokens=engine.max_len,
        vocab_size=info.vocab_size,
        device=info.device,
        dtype=info.dtype,
        backend=info.backend,
        kv_dtype=info.kv_dtype,
        loaded_at=int(served.loaded_at),
        notice=info.notice,
        tool_format=tool_format_of(read_template_source(served.model_dir) or ""),
    )
