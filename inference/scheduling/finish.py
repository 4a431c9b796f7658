"""When a running request has had its last token. No torch."""

from collections.abc import Collection
from dataclasses import dataclass

from inference.outputs import TokenOutput
from inference.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class FinishRules:
    """One request's rules, worked out once when it starts.

    Stop strings are not here: text is the generator's, which ends a request through `Engine.abort`.
    """

    eos_token_ids: Collection[int]
    stop_token_ids: Collection[int]
    min_tokens: int
    # Output tokens at which it ends, and what set that limit.
    max_output_tokens: int
    limit_detail: str

    @classmethod
    def of(cls, request: Request, eos_token_ids: Collection[int], max_len: int) -> "FinishRules":
        params = request.params
        room = max_len - request.num_prompt_tokens
        is_asked = params.max_tokens is not None and params.max_tokens <= room
        return cls(
            eos_token_ids=() if params.ignore_eos else eos_token_ids,
            stop_token_ids=frozenset(params.stop_token_ids),
            min_tokens=params.min_tokens,
            max_output_tokens=params.max_tokens if is_asked and params.max_tokens else room,
            limit_detail="max_tokens" if is_asked else "context",
        )

    def check(
        self, num_output_tokens: int, token: TokenOutput
    ) -> tuple[FinishReason, str | None] | None:
        """The end that `token`, the last of `num_output_tokens`, brings; None to go on."""
        token_id = token.token_id
        if token.ends:
            return FinishReason.STOP, None
        if num_output_tokens >= self.min_tokens:
            if token_id in self.eos_token_ids:
                return FinishReason.STOP, None
            if token_id in self.stop_token_ids:
                return FinishReason.STOP, str(token_id)
        if num_output_tokens >= self.max_output_tokens:
            return FinishReason.LENGTH, self.limit_detail
        return None
