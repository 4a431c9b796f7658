"""Errors that people and scripts see, and the one table from error to HTTP status and socket code.

    ApplianceError
      BadRequest              400  invalid_request
        ContextLengthExceeded 400  context_length_exceeded
      NotAuthenticated        401  invalid_api_key
      NotAllowed              403  not_allowed
      NotFound                404  not_found
        ModelNotFound         404  model_not_found
      RequestTooSlow          408  request_too_slow
      Conflict                409  conflict
      BodyTooLarge            413  body_too_large
      QuotaExceeded           429  insufficient_quota
      RateLimited             429  rate_limit_exceeded
      QueueIsFull             503  queue_full
      EngineUnavailable       503  engine_unavailable
      StorageUnavailable      503  storage_unavailable
      GenerationFailed        500  generation_failed    after the stream began

A message says what was wrong, what it got, what is allowed, and what to do. `code` is stable:
scripts and the browser switch on it.
"""


class ApplianceError(Exception):
    """Base of all errors shown to callers. `param` names the field at fault, if one is."""

    status = 500
    code = "internal_error"
    # OpenAI's `type` of the error envelope.
    error_type = "server_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequest(ApplianceError):
    status = 400
    code = "invalid_request"
    error_type = "invalid_request_error"


class ContextLengthExceeded(BadRequest):
    code = "context_length_exceeded"


class NotAuthenticated(ApplianceError):
    status = 401
    code = "invalid_api_key"
    error_type = "authentication_error"


class NotAllowed(ApplianceError):
    status = 403
    code = "not_allowed"
    error_type = "permission_error"


class NotFound(ApplianceError):
    status = 404
    code = "not_found"
    error_type = "invalid_request_error"


class ModelNotFound(NotFound):
    code = "model_not_found"


class RequestTooSlow(ApplianceError):
    status = 408
    code = "request_too_slow"
    error_type = "invalid_request_error"


class Conflict(ApplianceError):
    status = 409
    code = "conflict"
    error_type = "invalid_request_error"


class BodyTooLarge(ApplianceError):
    status = 413
    code = "body_too_large"
    error_type = "invalid_request_error"


class QuotaExceeded(ApplianceError):
    status = 429
    code = "insufficient_quota"
    error_type = "insufficient_quota"


class RateLimited(ApplianceError):
    """`max_wait_s`: how long the limit's rule lets a request wait for its turn, in the line of
    `subject` (`user:5`, `key:9`), before this is said."""

    status = 429
    code = "rate_limit_exceeded"
    error_type = "rate_limit_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        max_wait_s: float = 0.0,
        subject: str = "",
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.max_wait_s = max_wait_s
        self.subject = subject


class QueueIsFull(ApplianceError):
    status = 503
    code = "queue_full"


class EngineUnavailable(ApplianceError):
    status = 503
    code = "engine_unavailable"


class StorageUnavailable(ApplianceError):
    """The database is away, locked or has no room on its disk; what runs goes on."""

    status = 503
    code = "storage_unavailable"

    def __init__(self) -> None:
        super().__init__(
            "The server's database does not take this now. Try again in a moment; tell an admin "
            "if it stays.",
            retry_after_s=5,
        )


class GenerationFailed(ApplianceError):
    status = 500
    code = "generation_failed"
