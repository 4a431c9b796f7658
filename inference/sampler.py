"""Logits to token ids, for all requests of a step at once.

Drawing keeps no state. A token is the inverse of the cumulative distribution at one number in
[0, 1), and that number is a hash of the request's seed and of the position. So a seeded request has
the same text alone, in any batch and after a preemption, and so has an unseeded one within itself.

A row is changed only by its own request's parameters. Temperature comes first, then top_k, then
top_p over what top_k left, then min_p (`nucleus.py`).
"""

import hashlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inference.device_copies import HostCopy, array_to_device, to_device
from inference.grammar.masking import accept_tokens, bar_tokens
from inference.grammar.matcher import TokenMatcher
from inference.nucleus import RUN, least_weights, runs_of
from inference.outputs import TokenLogprobs, TokenOutput
from inference.penalties import IntArray, TokenCounts, penalise_rows, places
from inference.request import Request
from inference.sampling_params import SamplingParams
from kernels.sampling import sample

_UNUSABLE = "The model gave no usable scores for the next token (not a number, or none allowed)."
_NONE: IntArray = np.zeros(0, np.int64)


@dataclass(slots=True)
class _Plan:
    """What one request asks of the sampler; made once, dropped when the request ends."""

    greedy: bool
    edits: bool
    logprobs: int | None
    seed: int
    params: SamplingParams
    bias_ids: IntArray = field(default_factory=lambda: _NONE)
    biases: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    # End-of-sequence and stop ids, barred until min_tokens are there.
    barred_ids: IntArray = field(default_factory=lambda: _NONE)
    # What its penalties count, if it has any.
    counts: TokenCounts | None = None
    # Where a constrained answer stands in its grammar.
    matcher: TokenMatcher | None = None


class Sampler:
    """Owned by the engine thread.

    Args:
        vocab_size: ids at or past this are never chosen, however wide the logits.
        eos_token_ids: barred while a request has fewer than `min_tokens`.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._plans: dict[str, _Plan] = {}
        # Unseeded requests differ between runs of the server and cannot be guessed.
        self._secret = secrets.token_bytes(16)

    def sample(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        meanwhile: Callable[[Tensor], None] = lambda token_ids: None,
    ) -> list[TokenOutput]:
        """The next token of each request.

        Args:
            logits: [num_requests, at least vocab_size] fp32; may be changed.
            requests: one a row, in order.
            meanwhile: called with the ids [num_requests] int64 as they lie on the device, -1 where
                there is none, while they are copied to the host.
        """
        logits = logits[:, : self._vocab_size]
        plans = [self._plan(request) for request in requests]
        wanting = [row for row, plan in enumerate(plans) if plan.logprobs is not None]
        scored = array_to_device(np.array(wanting, np.int64), logits.device) if wanting else None
        scores = None if scored is None else logits[scored]  # a copy, before edits
        edited = [row for row, plan in enumerate(plans) if plan.edits]
        if edited:
            self._edit(logits, edited, requests, plans)
        matchers = {row: plan.matcher for row, plan in enumerate(plans) if plan.matcher}
        failures = bar_tokens(logits, requests, matchers) if matchers else {}
        best, token_ids = logits.max(dim=-1)
        drawing = [row for row, plan in enumerate(plans) if not plan.greedy]
        if drawing:
            _draw_rows(token_ids, logits, drawing, requests, plans)
        token_ids.masked_fill_(~best.isfinite(), -1)
        table = None
        if scores is not None:
            width = max(plans[row].logprobs or 0 for row in wanting)
            table = _logprobs(token_ids[scored], scores, width)
        copied = HostCopy(
            token_ids if table is None else torch.cat([token_ids.double(), table.flatten()])
        )
        meanwhile(token_ids)
        numbers = copied.read()
        outputs = [_output(int(token_id)) for token_id in numbers[: len(plans)]]
        if table is not None:
            _add_logprobs(outputs, numbers[len(plans) :], table.shape[1], wanting, plans)
        if matchers:
            accept_tokens(outputs, matchers, failures)
        return outputs

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests ended."""
        for request_id in request_ids:
            self._plans.pop(request_id, None)

    def _plan(self, request: Request) -> _Plan:
        plan = self._plans.get(request.request_id)
        if plan is None:
            plan = self._make_plan(request)
            self._plans[request.request_id] = plan
        return plan

    def _make_plan(self, request: Request) -> _Plan:
        params = request.params
        barred = (*self._eos_token_ids, *params.stop_token_ids) if params.min_tokens else ()
        bias = {i: b for i, b in params.logit_bias.items() if 0 <= i < self._vocab_size}
        plan = _Plan(
            greedy=params.is_greedy or params.top_k == 1,
            edits=params.needs_penalties or bool(bias) or bool(barred),
            logprobs=params.logprobs,
            seed=self._seed(request),
            params=params,
            bias_ids=np.fromiter(bias.keys(), np.int64, len(bias)),
            biases=np.fromiter(bias.values(), np.float32, len(bias)),
            barred_ids=self._known(barred),
        )
        if request.grammar is not None:
            plan.matcher = request.grammar.new_matcher()
        if params.needs_penalties:
            # The other two are of the output alone.
            is_of_prompt = params.repetition_penalty != 1.0
            plan.counts = TokenCounts(self._known(request.prompt_token_ids if is_of_prompt else ()))
        return plan

    def _seed(self, request: Request) -> int:
        seed = request.params.seed
        if seed is not None:
            return seed % 2**64
        digest = hashlib.blake2b(request.request_id.encode(), key=self._secret, digest_size=8)
        return int.from_bytes(digest.digest())

    def _known(self, token_ids: Iterable[int]) -> IntArray:
        """Distinct ids inside the vocabulary."""
        ids = np.unique(np.array(list(token_ids), np.int64))
        return ids[(ids >= 0) & (ids < self._vocab_size)]

    def _edit(
        self,
        logits: Tensor,
        rows: list[int],
        requests: Sequence[Request],
        plans: Sequence[_Plan],
    ) -> None:
        """Penalties, then bias, then bars, in place, touching only `rows`."""
        penalised = [row for row in rows if plans[row].params.needs_penalties]
        if penalised:
            counts = [_counts(plans[row], requests[row]) for row in penalised]
            penalise_rows(logits, penalised, counts, [plans[row].params for row in penalised])
        biased = [row for row in rows if plans[row].bias_ids.size]
        if biased:
            at = places(biased, [plans[row].bias_ids for row in biased], logits.device)
            addends = np.concatenate([plans[row].biases for row in biased])
            logits[at] += array_to_device(addends, logits.device)
        short = [
            row
            for row in rows
            if len(requests[row].output_token_ids) < plans[row].params.min_tokens
        ]
        if short:
            at = places(short, [plans[row].barred_ids for row in short], logits.device)
            logits[at] = float("-inf")


def draw(
    logits: Tensor,
    uniform: npt.NDArray[np.float64],
    *,
    temperature: npt.NDArray[np.float32],
    top_k: IntArray,
    top_p: npt.NDArray[np.float64],
    min_p: npt.NDArray[np.float64],
) -> Tensor:
    """Draw a token id from each row at its number in [0, 1); [num_rows] int64.

    Tokens that tie with the last one kept by top_k or top_p are kept too, so that the result does
    not depend on how a sort breaks ties. `logits` is overwritten.
    """
    device = logits.device
    logits.div_(torch.from_numpy(temperature).to(device)[:, None])
    # In place, since fresh memory of this size costs more than the arithmetic.
    weights = logits.sub_(logits.amax(dim=-1, keepdim=True)).exp_()  # the most likely weighs 1
    if (top_k > 0).any() or (top_p < 1).any() or (min_p > 0).any():
        floor = torch.from_numpy(min_p).to(device, torch.float32)
        if (top_k > 0).any() or (top_p < 1).any():
            floor = torch.maximum(floor, least_weights(weights, top_k, top_p))
        weights.mul_(weights >= floor[:, None])
    return _pick(weights, torch.from_numpy(uniform).to(device))


def _pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """[num_rows] int64: the first place where the running sum passes `uniform` of the whole.

    First the run of tokens, then the token in it, so that only one run is summed token by token.
    """
    num_rows, vocab_size = weights.shape
    runs = runs_of(weights)
    sums = runs.sum(dim=-1).double()
    ends = sums.cumsum(dim=-1)
    target = uniform[:, None] * ends[:, -1:]
    run = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    share = (target - (ends - sums).gather(1, run)) / sums.gather(1, run)
    tokens = runs[torch.arange(num_rows, device=weights.device), run[:, 0]]
    within = tokens.cumsum(dim=-1, dtype=torch.float64)
    # Below 1, so that the place found weighs more than 0.
    target = share.clamp(0.0, 1.0 - 2.0**-40) * within[:, -1:]
    token = torch.searchsorted(within, target, right=True).clamp_(max=RUN - 1)
    return (run * RUN + token)[:, 0].clamp_(max=vocab_size - 1)


def _counts(plan: _Plan, request: Request) -> TokenCounts:
    assert plan.counts is not None, f"{request.request_id} has no penalties"
    plan.counts.count(request.output_token_ids)
    return plan.counts


def _draw_rows(
    token_ids: Tensor,
    logits: Tensor,
    rows: list[int],
    requests: Sequence[Request],
    plans: Sequence[_Plan],
) -> None:
    """Draw the ids of `rows`, in place."""
    params = [plans[row].params for row in rows]
    seeds = np.array([plans[row].seed for row in rows], np.uint64)
    positions = np.array([requests[row].num_tokens for row in rows], np.int64)
    temperature = np.array([each.temperature for each in params], np.float32)
    top_k = np.array([each.top_k for each in params], np.int64)
    top_p = np.array([each.top_p for each in params], np.float64)
    min_p = np.array([each.min_p for each in params], np.float64)
    if logits.device.type == "cpu":
        token_ids[rows] = draw(
            logits[rows],
            uniform_numbers(seeds, positions.astype(np.uint64)),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
        )
        return
    # A GPU draws without sorting; its numbers are others than the CPU's, and as reproducible.
    arrays: dict[str, npt.NDArray[Any]] = {
        "rows": np.array(rows, np.int64),
        "seeds": seeds.view(np.int64),
        "positions": positions,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p.astype(np.float32),
        "min_p": min_p.astype(np.float32),
    }
    moved = to_device(arrays, logits.device)
    at = moved["rows"]
    token_ids[at] = sample(
        logits[at],
        moved["seeds"],
        moved["positions"],
        temperature=moved["temperature"],
        top_k=moved["top_k"],
        top_p=moved["top_p"],
        min_p=moved["min_p"],
    )


def uniform_numbers(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) of each seed and position: SplitMix64's finaliser, applied twice.

    40 bits, so that its product with a sum stays below the sum in double precision.
    """
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds) + positions * np.uint64(0x9E3779B97F4A7C15))
    return (mixed >> np.uint64(24)).astype(np.float64) * 2.0**-40


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _output(token_id: int) -> TokenOutput:
    return TokenOutput(token_id) if token_id >= 0 else TokenOutput(-1, error=_UNUSABLE)


def _logprobs(token_ids: Tensor, scores: Tensor, width: int) -> Tensor:
    """Of each row, float64: its id's log probability, the `width` greatest ones, their ids."""
    normaliser = scores.logsumexp(dim=-1, keepdim=True)
    chosen = scores.gather(1, token_ids.clamp(min=0)[:, None])
    top = scores.topk(min(width, scores.shape[1]), dim=-1)
    return torch.cat([chosen - normaliser, top.values - normaliser, top.indices.double()], dim=1)


def _add_logprobs(
    outputs: list[TokenOutput],
    table: list[float],
    size: int,
    rows: list[int],
    plans: Sequence[_Plan],
) -> None:
    """Put the rows of `_logprobs`, each of `size` numbers, into the outputs of `rows`."""
    num_top = (size - 1) // 2
    for index, row in enumerate(rows):
        if outputs[row].error is not None:
            continue
        values = table[index * size : (index + 1) * size]
        count = min(plans[row].logprobs or 0, num_top)
        ids = [int(token_id) for token_id in values[1 + num_top : 1 + num_top + count]]
        top_pairs = list(zip(ids, values[1 : 1 + count], strict=True))
        outputs[row].logprobs = TokenLogprobs(values[0], top_pairs)
