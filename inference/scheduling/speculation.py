"""Lookahead without a draft model: what followed these words may follow them again. No torch.

A request that repeats itself or its prompt gets the tokens that followed the last three the time
before as a draft; one step computes them all, and those that the model itself would have said are
taken (speculative decoding, arXiv:2211.17192; drafts by prompt lookup). Only for greedy requests
whose scores nobody changes, where "would have said" is a plain comparison, so the answer is the
same with it and without.

Drafts take what a step has left: token budget behind decodes and prompts, blocks that nobody is
about to need. A rejected token costs its computing only; its place in the KV cache is written
again by the next step. Owner: the engine thread.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from inference.kv_cache.manager import KVCacheManager
from inference.outputs import ScheduledRequest, SchedulerOutput, Setting, StepOutput, TokenOutput
from inference.request import Request
from inference.sampling_params import SamplingParams
from inference.scheduling.running import RunningRequests

# More rows than this would take the CPU's slower way of multiplying.
MAX_DRAFT = 4
_MATCH = 3
# How far back is looked.
_WINDOW = 16_384
# Steps that a request sits out after drafts of which nothing was taken.
_MAX_PAUSE = 32
# What "auto" wants to know before it decides, and how much faster drafts must be.
_LEAST_PLAIN = 4
_TRIAL = 8
_LEAST_GAIN = 1.03
# Steps after which it tries again; every so many a step without drafts keeps the comparison fresh.
_REST = 256
_PLAIN_EVERY = 32
_SMOOTHING = 0.2


def is_exact(params: SamplingParams) -> bool:
    """Whether each token is the most likely one, whatever was sampled before it."""
    return (
        (params.is_greedy or params.top_k == 1)
        and not params.needs_penalties
        and not params.logit_bias
        and not params.min_tokens
        and params.logprobs is None
        and params.constraint is None
    )


def taken_tokens(
    part: ScheduledRequest, step_output: StepOutput
) -> tuple[list[TokenOutput], TokenOutput | None]:
    """What a step said of one request: drafts that were accepted, and the sampled token, which
    has an `error` if there is none. None for a prompt that goes on."""
    if not part.samples:
        return [], None
    request_id = part.request.request_id
    num_accepted = step_output.num_accepted.get(request_id, 0)
    sampled = step_output.tokens.get(request_id)
    if sampled is None:
        sampled = TokenOutput(-1, error="The model gave no token.")
    return [TokenOutput(n) for n in part.draft_token_ids[:num_accepted]], sampled


def accept_draft(draft: list[int], sampled: list[TokenOutput]) -> tuple[int, TokenOutput]:
    """How many of the draft the model agrees with, and the token that it says after those.

    Args:
        sampled: one longer than the draft: what follows the known tokens, then what follows each
            token of the draft.
    """
    num_accepted = 0
    for token_id, output in zip(draft, sampled, strict=False):
        if output.error is not None or output.token_id != token_id:
            break
        num_accepted += 1
    return num_accepted, sampled[num_accepted]


class _Lookup:
    """One request's tokens, and how its drafts have fared."""

    def __init__(self) -> None:
        self._ids: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._count = 0
        self._pause = 0
        self._misses = 0

    def draft(self, request: Request, most: int) -> list[int]:
        """Up to `most` tokens that may come next."""
        if self._pause:
            self._pause -= 1
            return []
        self._follow(request)
        ids = self._ids[max(0, self._count - _WINDOW) : self._count]
        if len(ids) <= _MATCH:
            return []
        ends = np.flatnonzero(ids[_MATCH - 1 : -1] == ids[-1]) + (_MATCH - 1)
        for back in range(1, _MATCH):
            ends = ends[ids[ends - back] == ids[-1 - back]]
        if not ends.size:
            return []
        # The latest place that has enough behind it, or what repeats itself is never seen ahead.
        long_enough = ends[ends + most < len(ids)]
        end = int(long_enough[-1] if long_enough.size else ends[0])
        return [int(n) for n in ids[end + 1 : end + 1 + most]]

    def on_result(self, num_accepted: int) -> None:
        if num_accepted:
            self._misses = 0
            return
        self._misses += 1
        self._pause = min(2**self._misses, _MAX_PAUSE)

    def _follow(self, request: Request) -> None:
        num_tokens = request.num_tokens
        if num_tokens > len(self._ids):
            grown = np.empty(max(256, 2 * num_tokens), np.int32)
            grown[: self._count] = self._ids[: self._count]
            self._ids = grown
        self._ids[self._count : num_tokens] = request.token_ids_between(self._count, num_tokens)
        self._count = num_tokens


@dataclass(slots=True)
class _Rates:
    """Steps of one size: what they take with drafts and without."""

    plain_s: float = 0.0
    num_plain: int = 0
    draft_s: float = 0.0
    # Tokens of a request in a step with drafts.
    tokens: float = 0.0
    num_draft: int = 0
    num_asked: int = 0
    num_rested: int = 0

    def gain(self) -> float | None:
        """How many times as fast answers are with drafts; None while too little is known."""
        if self.num_plain < _LEAST_PLAIN or self.num_draft < _TRIAL or self.draft_s <= 0.0:
            return None
        return self.tokens * self.plain_s / self.draft_s

    def on_plain(self, step_s: float) -> None:
        self.num_plain += 1
        self.plain_s += max(_SMOOTHING, 1 / self.num_plain) * (step_s - self.plain_s)

    def on_draft(self, step_s: float, tokens: float) -> None:
        self.num_draft += 1
        weight = max(_SMOOTHING, 1 / self.num_draft)
        self.draft_s += weight * (step_s - self.draft_s)
        self.tokens += weight * (tokens - self.tokens)

    def wants_draft(self) -> bool:
        """What "auto" does in the next step of this size."""
        self.num_asked += 1
        if self.num_plain < _LEAST_PLAIN or self.num_asked % _PLAIN_EVERY == 0:
            return False
        gain = self.gain()
        if gain is None or gain >= _LEAST_GAIN:
            return True
        self.num_rested += 1
        if self.num_rested >= _REST:
            self.num_rested = self.num_draft = 0
        return False


@dataclass(slots=True)
class Speculation:
    """`extend` a planned step by drafts, then tell what came of it with `on_step`."""

    # off, on or auto
    asked: str = "auto"
    _lookups: dict[str, _Lookup] = field(default_factory=dict)
    # By the number of requests in a step, in powers of two.
    _rates: dict[int, _Rates] = field(default_factory=dict)
    _last_gain: float | None = None

    @property
    def setting(self) -> Setting:
        if self.asked != "auto":
            return Setting(self.asked, self.asked)
        gain = self._last_gain
        if gain is None:
            return Setting("auto", "off", "not measured yet: few answers repeat themselves so far")
        is_on = gain >= _LEAST_GAIN
        return Setting(
            "auto", "on" if is_on else "off", f"measured {gain:.2f} times as fast with it"
        )

    def extend(
        self,
        parts: dict[str, ScheduledRequest],
        running: RunningRequests,
        kv: KVCacheManager,
        budget: int,
    ) -> None:
        """Add drafts to decodes in `parts`, in at most `budget` more tokens, behind all others.

        `parts` holds no prompts: what waits for its first token goes before.
        """
        able = [part for part in parts.values() if is_exact(part.request.params)]
        if self.asked == "off" or budget < 1 or not able:
            return
        if self.asked == "auto" and not self._rates_of(len(parts)).wants_draft():
            return
        for part in able:
            draft = self._draft(part, running, kv, budget)
            if not draft:
                continue
            request = part.request
            kv.allocate_slots(request, part.start + 1 + len(draft))
            table = kv.table(request.request_id).copy()
            del parts[request.request_id]
            parts[request.request_id] = ScheduledRequest(
                request, part.start, 1 + len(draft), table, samples=True, draft_token_ids=draft
            )
            budget -= len(draft)

    def on_step(self, output: SchedulerOutput, step_output: StepOutput) -> None:
        """What a step took and said, of one that only decoded."""
        drafted = [part for part in output.scheduled if part.draft_token_ids]
        for part in drafted:
            lookup = self._lookups.get(part.request.request_id)
            if lookup is not None:
                lookup.on_result(step_output.num_accepted.get(part.request.request_id, 0))
        num_requests = len(output.scheduled)
        if output.num_tokens != num_requests + sum([len(p.draft_token_ids) for p in drafted]):
            return
        if not all(part.samples for part in output.scheduled):
            return
        rates = self._rates_of(num_requests)
        step_s = step_output.forward_s + step_output.host_s
        if drafted:
            num_accepted = sum(step_output.num_accepted.values())
            rates.on_draft(step_s, 1 + num_accepted / num_requests)
            self._last_gain = rates.gain() or self._last_gain
        else:
            rates.on_plain(step_s)

    def forget(self, request_id: str) -> None:
        self._lookups.pop(request_id, None)

    def _draft(
        self, part: ScheduledRequest, running: RunningRequests, kv: KVCacheManager, budget: int
    ) -> list[int]:
        request = part.request
        run = running.get(request.request_id)
        if run is None or part.num_new_tokens != 1 or not part.samples:
            return []
        room = len(kv.table(request.request_id)) * kv.block_size - part.start - 1
        if kv.pool.num_available > len(running):
            room += kv.block_size
        # The last token that may come needs none behind it.
        wanted = run.rules.max_output_tokens - len(request.output_token_ids) - 1
        most = min(MAX_DRAFT, budget, room, wanted)
        if most < 1:
            return []
        lookup = self._lookups.get(request.request_id)
        if lookup is None:
            lookup = self._lookups[request.request_id] = _Lookup()
        return lookup.draft(request, most)

    def _rates_of(self, num_requests: int) -> _Rates:
        return self._rates.setdefault(num_requests.bit_length(), _Rates())
