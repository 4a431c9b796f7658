"""The seams: what passes between scheduler, runner, engine and generator. Plain data, no torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from inference.request import FinishReason, Request

# ---- scheduler -> runner


@dataclass(slots=True)
class ScheduledRequest:
    """One request's part of a step: compute its tokens [start, start + num_new_tokens).

    The runner may read `request` (prompt, output, params) and must not change it.
    """

    request: Request
    # == request.num_computed_tokens when the step was planned
    start: int
    num_new_tokens: int
    # Block ids in order, long enough for start + num_new_tokens tokens. A copy: the manager's own
    # list may grow while the step runs.
    block_table: list[int]
    # True when the last of the new tokens is the newest known token, so a next one is sampled.
    samples: bool
    # Guesses of what follows the newest known token: the last of the new tokens. The runner samples
    # after the newest known token and after each of these.
    draft_token_ids: list[int] = field(default_factory=list)

    def token_ids(self) -> list[int]:
        """Ids of the new tokens."""
        end = self.start + self.num_new_tokens - len(self.draft_token_ids)
        return self.request.token_ids_between(self.start, end) + self.draft_token_ids


@dataclass(slots=True)
class SchedulerOutput:
    """One step. `scheduled` holds decodes first, then drafts and prompt chunks."""

    step_id: int
    scheduled: list[ScheduledRequest]
    num_tokens: int
    # (source, destination) block ids to copy before the forward pass.
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    # Requests that ended since the last step; the runner drops what it keeps for them.
    finished_request_ids: list[str] = field(default_factory=list)


# ---- runner -> scheduler


@dataclass(slots=True)
class TokenLogprobs:
    """Natural-log probabilities of one sampled position, before temperature and masks."""

    token_logprob: float
    # (token id, log probability), most likely first; as many as the request asked for.
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class TokenOutput:
    token_id: int
    logprobs: TokenLogprobs | None = None
    # Set when this row alone could not be sampled (for example NaN logits); token_id is then -1.
    error: str | None = None
    # The error is of what the caller asked for, not of the server.
    is_refusal: bool = False
    # The answer is complete with this token: the grammar that it is held to ends here.
    ends: bool = False


@dataclass(slots=True)
class StepOutput:
    """Sampled tokens by request id, for those scheduled with `samples`."""

    tokens: dict[str, TokenOutput]
    # Leading draft tokens, by request id, that the model agreed with; `tokens` holds what follows
    # them. None where it is absent.
    num_accepted: dict[str, int] = field(default_factory=dict)
    # Seconds of the forward pass and sampling, and of preparing tensors, on the engine thread.
    forward_s: float = 0.0
    host_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerInfo:
    """What the engine must know of a loaded model and its KV storage."""

    model_name: str
    # Ids at or past this are never sampled: len(tokenizer), at most the width of the logits.
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int
    bytes_per_block: int
    default_max_num_batched_tokens: int
    # For people: "cpu", "cuda:0 NVIDIA H200"; "bfloat16"; "native AVX-512 BF16" or "torch".
    device: str
    dtype: str
    backend: str
    # Memory that the weights leave, of which the KV pool takes a share; 0 when nobody can tell.
    kv_budget_bytes: int = 0
    # Of keys and values: "bfloat16", "int8".
    kv_dtype: str = ""
    # Plain sentence for the console when a slower path than possible is in use, else "".
    notice: str = ""


class Runner(Protocol):
    """Computes steps. Every method is called on the engine thread only."""

    def load(self, on_progress: Callable[[float, str], None]) -> RunnerInfo:
        """Load weights and make the KV storage.

        Raises:
            ModelLoadError: nothing half-loaded is left behind.
        """

    def execute(self, scheduler_output: SchedulerOutput) -> StepOutput:
        """Run one step; returns a token for each scheduled request with `samples`."""

    def move_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole KV blocks, (source, destination) each, between two steps."""

    def resize_kv(self, num_blocks: int) -> None:
        """Make the KV storage this many blocks large; what lower blocks hold stays.

        Raises:
            NotEnoughMemory: nothing was changed.
        """

    def close(self) -> None:
        """Give all memory back; idempotent."""


# ---- engine thread -> consumer (through RequestStream)


@dataclass(slots=True)
class StreamUpdate:
    """Everything new about one request since the consumer last looked; merged, never queued.

    Exactly one update of a stream has `finish_reason` set, and it is the last.
    """

    token_ids: list[int] = field(default_factory=list)
    # Parallel to token_ids when the request asked for logprobs, else empty.
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # While waiting: how many requests are served before this one; None once running.
    queue_position: int | None = None
    # Estimated seconds until it starts; None without a basis for one.
    estimated_wait_s: float | None = None
    num_computed_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    finish_detail: str | None = None


# ---- generator -> caller


@dataclass(slots=True)
class QueueUpdate:
    """The request waits; `ahead` others are served first."""

    ahead: int
    estimated_wait_s: float | None


@dataclass(slots=True)
class PromptProgress:
    """The prompt is being computed."""

    num_computed_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(slots=True)
class TextDelta:
    """New text. `num_tokens` is the number of tokens generated so far in all."""

    text: str
    num_tokens: int
    # One per token behind this text, when asked for: (token text, raw bytes, logprobs).
    logprobs: list["TextLogprob"] = field(default_factory=list)


@dataclass(slots=True)
class TextLogprob:
    token: str
    token_bytes: bytes
    logprob: float
    top: list[tuple[str, bytes, float]] = field(default_factory=list)


@dataclass(slots=True)
class GenerationFinished:
    """The last event of a generation, exactly once."""

    finish_reason: FinishReason
    # The stop string or id that ended it, or the error's text.
    detail: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    queue_s: float
    # add_request to first delta, queue time included; None when no token came.
    ttft_s: float | None
    duration_s: float
    # Whether any of it was computed; False for one that ended while it waited.
    has_started: bool = True


TextEvent = QueueUpdate | PromptProgress | TextDelta | GenerationFinished


# ---- engine -> observers


SettingValue = int | float | str | bool | Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Setting:
    """A live setting: what was asked, what holds now, and why they differ ("" when they do not)."""

    requested: SettingValue
    effective: SettingValue
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """One running or waiting request, for the console."""

    request_id: str
    owner: str
    labels: Mapping[str, str]
    request_class: str
    # waiting, prefill, decode or preempted
    state: str
    # Which parallel slot it sits in (0-based); None while waiting.
    slot: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_blocks: int
    # Blocks that only this request holds.
    num_own_blocks: int
    queue_position: int | None
    age_s: float
    ttft_s: float | None
    tokens_per_s: float | None
    num_preemptions: int
    # Why it waits (`scheduling/waits.py`); None while running.
    wait: Mapping[str, int | str] | None = None


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """Something an admin would want to read, in fields; the console makes the sentence."""

    event_id: int
    # preempted, evicted, finished, aborted, failed, rejected, tuned, admitted
    kind: str
    # time.time(), for display only
    at: float
    request_id: str | None
    labels: Mapping[str, str]
    data: Mapping[str, int | float | str]


@dataclass(frozen=True, slots=True)
class KVStats:
    block_size: int
    bytes_per_block: int
    blocks_total: int
    # Held by running requests (shared ones counted once); used + cached + free = total.
    blocks_used: int
    # Unreferenced, content kept for a later prefix hit.
    blocks_cached: int
    blocks_free: int
    # Of the used ones: held by two or more requests.
    blocks_shared: int
    # Token slots in used blocks that hold no token yet.
    slots_wasted: int


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """A beginning of prompts that was found in the cache."""

    num_tokens: int
    num_hits: int
    # Who finds it: a request's `cache_scope`, or "" for everybody: the server's own text.
    scope: str


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An immutable picture of the engine, published by its thread; any thread may keep it."""

    # loading, ready, draining, dead
    state: str
    # Load progress in [0, 1] and what is being done, while loading; else (1.0, "").
    progress: tuple[float, str]
    error: str | None
    step_id: int
    # time.monotonic() of the last finished step, or of becoming ready.
    last_step_s: float
    slots: Setting
    settings: Mapping[str, Setting]
    num_running: int
    num_waiting: int
    kv: KVStats
    # Over the last few seconds.
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    # Share of prompt tokens found in the cache, of the last 15 minutes; None without prompts.
    cache_hit_rate: float | None
    # Seconds; percentiles over recent requests, None without any: keys p50 and p95.
    ttft_s: Mapping[str, float | None]
    itl_s: Mapping[str, float | None]
    step_host_ms: float
    step_forward_ms: float
    # Counters since start.
    totals: Mapping[str, int]
    requests: Sequence[RequestInfo]
    # Those that saved the most tokens, the first most.
    prefixes: Sequence[PrefixStats] = ()


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Every block's state at one step, for the console's map.

    `cells[i]` describes block i: -1 free, -2 cached, or an index into `holders`.
    A holder is one request id, or several for a shared block.
    """

    step_id: int
    cells: Sequence[int]
    holders: Sequence[tuple[str, ...]]
    # Block id -> tokens in it, for used blocks that are not full.
    partial: Mapping[int, int]
    # Block id -> first token position it holds, for used blocks.
    token_start: Mapping[int, int]
