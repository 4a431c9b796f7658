"""What a caller may ask of the sampler, with its ranges. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from inference.errors import InvalidSamplingParams
from inference.grammar.constraint import Constraint

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 512
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one generation. Call `validate()` before queueing it.

    Raises:
        InvalidSamplingParams: from `validate()`; its `param` names the field.
        InvalidConstraint: the same of `constraint`.
    """

    # Most new tokens; None means as many as the context allows.
    max_tokens: int | None = None
    # 0 is greedy; below 1e-4 counts as greedy, since logits / temperature would overflow.
    temperature: float = 1.0
    # Nucleus sampling (arXiv:1904.09751); 1 is off.
    top_p: float = 1.0
    # 0 is off.
    top_k: int = 0
    # Least probability relative to the most likely token; 0 is off.
    min_p: float = 0.0
    # 1 is off. Once per distinct id of prompt and output.
    repetition_penalty: float = 1.0
    # Over output tokens only: presence is 0 or 1 times, frequency counts.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # token id -> addend in [-100, 100]
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    # Same seed and prompt give the same text whatever else is in the batch.
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    # Number of top alternatives per token; None is off, 0 gives the chosen token alone.
    logprobs: int | None = None
    # The form that the answer is held to. It ends where that form ends, before min_tokens too.
    constraint: Constraint | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-4

    @property
    def needs_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def validate(self, *, vocab_size: int | None = None) -> None:
        """Check every range. `vocab_size` bounds the token ids where it is known."""
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _real("temperature", self.temperature, 0.0, 2.0)
        _real("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _whole("top_k", self.top_k, 0, 2**31 - 1)
        _real("min_p", self.min_p, 0.0, 1.0)
        # Scores are divided by it: far below this they leave the range of a float.
        _real("repetition_penalty", self.repetition_penalty, 0.01, 2.0)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**63 - 1)
        _whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidSamplingParams(
                f"min_tokens is {self.min_tokens}, more than max_tokens ({self.max_tokens}).",
                param="min_tokens",
            )
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.constraint is not None:
            self.constraint.check()
        self._validate_stops(vocab_size)
        self._validate_logit_bias(vocab_size)

    def _validate_stops(self, vocab_size: int | None) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidSamplingParams(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed.",
                param="stop",
            )
        for text in self.stop:
            if not isinstance(text, str) or not text or len(text) > MAX_STOP_STRING_CHARS:
                raise InvalidSamplingParams(
                    f"each stop string needs 1 to {MAX_STOP_STRING_CHARS} characters.",
                    param="stop",
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidSamplingParams(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; "
                f"at most {MAX_STOP_TOKEN_IDS} are allowed.",
                param="stop_token_ids",
            )
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0, (vocab_size or 2**31) - 1)

    def _validate_logit_bias(self, vocab_size: int | None) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidSamplingParams(
                f"logit_bias has {len(self.logit_bias)} entries; "
                f"at most {MAX_LOGIT_BIAS} are allowed.",
                param="logit_bias",
            )
        for token_id, bias in self.logit_bias.items():
            _whole("logit_bias", token_id, 0, (vocab_size or 2**31) - 1)
            _real("logit_bias", bias, -100.0, 100.0)


def _whole(name: str, got: object, low: int, high: int) -> None:
    if isinstance(got, bool) or not isinstance(got, int) or not low <= got <= high:
        raise InvalidSamplingParams(
            f"{name} is {got!r}; a whole number from {low} to {high} is allowed.", param=name
        )


def _real(name: str, got: object, low: float, high: float, *, low_open: bool = False) -> None:
    fits = (
        not isinstance(got, bool)
        and isinstance(got, int | float)
        and math.isfinite(got)
        and low <= got <= high
        and not (low_open and got == low)
    )
    if not fits:
        above = "above " if low_open else ""
        raise InvalidSamplingParams(
            f"{name} is {got!r}; a number from {above}{low:g} to {high:g} is allowed.", param=name
        )
