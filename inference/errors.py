"""Errors of the engine.

    InferenceError
      RequestRejected          refused at the door; nothing was queued
        PromptTooLong          can never fit the context or the KV pool
        InvalidSamplingParams  a parameter is out of its range
        InvalidConstraint      a schema or grammar that an answer cannot be held to
        InvalidPrompt          no tokens, unknown roles, a template that refuses the messages
        QueueFull              try again after `retry_after_s`
        EngineStopping         the server is draining
      RequestFailed            this request ended with an error; others go on
      EngineDead               the engine cannot go on; every stream ends with it
      SwapRefused              the model cannot be changed now
      ModelLoadError           nothing half-loaded is left behind
        UnsupportedArchitecture
        MissingWeights
        NotEnoughMemory

A message says what was wrong, what it got, what is allowed, and what to do.
"""


class InferenceError(Exception):
    """Base of all errors that the engine raises on purpose."""


class RequestRejected(InferenceError):
    """The request was refused before it was queued. `param` names the field at fault, if one is."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestRejected):
    """The prompt (plus at least one new token) can never fit.

    `num_prompt_tokens` is what was sent, or `at_least` of it was; `limit_tokens` the most that a
    prompt may have.
    """

    def __init__(
        self,
        num_prompt_tokens: int,
        limit_tokens: int,
        what: str = "context",
        *,
        at_least: bool = False,
    ) -> None:
        num = f"more than {num_prompt_tokens:,}" if at_least else f"{num_prompt_tokens:,}"
        super().__init__(
            f"The prompt has {num} tokens; at most {limit_tokens:,} fit the {what} and "
            "leave room for an answer. Shorten the conversation or start a new one.",
            param="messages",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.limit_tokens = limit_tokens


class InvalidSamplingParams(RequestRejected):
    """A sampling parameter is out of its range; `param` names it."""


class InvalidConstraint(RequestRejected):
    """A schema, regular expression or grammar is broken, unsupported or too costly."""


class InvalidPrompt(RequestRejected):
    """The prompt is empty, has an unknown role, or the model's template refuses it."""


class QueueFull(RequestRejected):
    """The waiting queue is at its limit. Try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineStopping(RequestRejected):
    """The engine is shutting down and takes no new requests."""


class RequestFailed(InferenceError):
    """One accepted request ended with an error; the others go on."""

    def __init__(self, message: str, *, request_id: str) -> None:
        super().__init__(message)
        self.request_id = request_id


class EngineDead(InferenceError):
    """The engine thread ended; no request can be served until it is rebuilt."""


class SwapRefused(InferenceError):
    """The model cannot be changed now; the message says what goes on instead."""


class ModelLoadError(InferenceError):
    """The model folder cannot be served; the message says why."""


class UnsupportedArchitecture(ModelLoadError):
    """The checkpoint's architecture is not one of those in `inference.models.registry`."""


class MissingWeights(ModelLoadError):
    """The folder lacks tensors that the architecture needs, or holds them in a wrong shape."""


class NotEnoughMemory(ModelLoadError):
    """The weights, or the smallest useful KV pool, do not fit the device."""
