"""One generation asked of the engine, from arrival to its single end. No torch."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from inference.grammar.matcher import Grammar
from inference.sampling_params import SamplingParams


class RequestClass(enum.StrEnum):
    """Who waits for the answer; decides order and what may be preempted."""

    INTERACTIVE = "interactive"
    API = "api"
    BACKGROUND = "background"


class RequestStatus(enum.StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    # Back in the waiting queue, blocks taken, output kept; recomputed when admitted again.
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    # What was asked for turned out to be more than the server does; the detail says what.
    REFUSED = "refused"


_LEGAL: Mapping[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.FINISHED}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """Owned by the engine thread from `Engine.add_request` on; read-only to everybody else.

    Compared and hashed by identity.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    # Whose share of service is charged, for example "user:17". Opaque to the engine.
    owner: str
    # Prefix blocks are shared only within one scope. Chosen by the server, never by the caller.
    cache_scope: str
    request_class: RequestClass = RequestClass.API
    # Shown in the console and never interpreted (user name, key prefix, conversation kind).
    labels: Mapping[str, str] = field(default_factory=dict)
    # How many leading prompt tokens are the server's own text, shareable between all scopes.
    num_public_prefix_tokens: int = 0
    # time.monotonic() seconds.
    arrival_s: float = 0.0
    # Still waiting at this time: ends with an error. None waits for ever.
    queue_deadline_s: float | None = None
    # Another request with the same prompt, as for n > 1: this one waits until that prompt is
    # computed and then shares its blocks. Ignored if that request is gone.
    fork_of: str | None = None
    # `params.constraint` compiled; set if and only if there is one.
    grammar: Grammar | None = None

    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    # The stop id or stop string that ended it, or the text of the error.
    finish_detail: str | None = None
    output_token_ids: list[int] = field(default_factory=list)
    # Most tokens of prompt and output together; set when it is queued.
    max_len: int = 0
    # Tokens whose k and v are in the cache.
    num_computed_tokens: int = 0
    # Prompt tokens found in the prefix cache at first admission.
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_ids_between(self, start: int, end: int) -> list[int]:
        """Ids at positions [start, end) of prompt followed by output."""
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt]

    def set_status(self, status: RequestStatus) -> None:
        """Move to `status`; an illegal transition is a bug in the engine."""
        assert status in _LEGAL[self.status], f"{self.request_id}: {self.status} to {status}"
        self.status = status
