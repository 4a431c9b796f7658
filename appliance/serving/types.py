"""What passes through the gateway: a request, its events, the engine's state. Plain data.

These are the product's own words, independent of any engine, so that another back end can stand
behind the same door.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Source = Literal["chat", "api", "capacity"]
GenerationClass = Literal["interactive", "api", "background"]
# How the loaded model writes calls of tools; "" when its template knows no tools.
ToolFormat = Literal["hermes", "llama3", "mistral", ""]
FinishReason = Literal["stop", "length", "abort", "error"]
ErrorCode = Literal["engine_unavailable", "invalid_request"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks: whose quota is charged, whose share of service, whose mark on the block map."""

    user_id: int
    username: str
    source: Source
    key_id: int | None = None
    key_prefix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """OpenAI's names and ranges plus common extensions; None takes the default."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """What an answer must look like; it ends when it is complete."""

    kind: Literal["json_object", "json_schema", "regex", "lark", "pieces"]
    # A JSON schema, a pattern or a grammar as text, or pieces: texts, lists of pieces, and the
    # mappings {"schema", "lenient"}, {"one_of"} and {"up_to", "of"}.
    source: Any = ""
    # The caller's name for it, which errors name.
    param: str = "response_format"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One generation. Exactly one of `messages` and `prompt` is set."""

    caller: Caller
    # {"role": ..., "content": ...}: role is system, developer, user, assistant or tool.
    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | Sequence[int] | None = None
    # {"type": "function", "function": {"name", "description", "parameters"}}, for the template.
    tools: Sequence[Mapping[str, Any]] = ()
    # The server's own instructions, before those of the messages: the part of a prompt that all
    # callers share in the prefix cache. Never from a caller.
    server_prompt: str | None = None
    # The server's own text with which the answer begins; counted as prompt.
    answer_start: str = ""
    # Of messages: whether the template begins the answer; and whether the last message, the
    # assistant's, is left open for the answer to go on with.
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    form: AnswerForm | None = None
    options: SamplingOptions = field(default_factory=SamplingOptions)
    generation_class: GenerationClass = "api"
    # None takes the loaded model; another name than the loaded model's is ModelNotFound.
    model: str | None = None


# ---- events, in the order in which they can come


@dataclass(frozen=True, slots=True)
class Queued:
    """Waiting; `ahead` others are served first. No estimate (None) without a basis for one."""

    ahead: int
    estimated_wait_s: float | None


@dataclass(frozen=True, slots=True)
class Reading:
    """The prompt is being computed."""

    done_tokens: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New text. `completion_tokens` counts all tokens generated so far."""

    text: str
    completion_tokens: int
    # (token, bytes, logprob, ((token, bytes, logprob), ...)) for each token, when asked for.
    logprobs: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event, exactly once. `error` is set (text for people) when the reason is "error".

    `error_code` is "engine_unavailable" for a request that was refused before anything of it was
    computed: the same request may succeed later, or on another server; "invalid_request" for one
    that showed only while it ran to ask for too much.
    """

    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float
    ttft_s: float | None
    duration_s: float
    error: str | None = None
    # The stop string that ended it, if one did; also ids of tokens, as text.
    stop: str | None = None
    error_code: ErrorCode | None = None


GenerationEvent = Queued | Reading | Delta | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The loaded model."""

    name: str
    context_tokens: int
    vocab_size: int
    device: str
    dtype: str
    backend: str
    # Unix seconds at which it was loaded.
    loaded_at: int
    # Of keys and values: "bfloat16", "int8".
    kv_dtype: str = ""
    # A plain sentence when a slower path than possible is in use, else "".
    notice: str = ""
    tool_format: ToolFormat = ""
