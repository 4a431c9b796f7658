"""Figures of the running engine: rates, times, hit rate, counters. Monotonic seconds. No torch.

TTFT runs from `add_request` to the first token and so includes queue time; ITL is the gap between
two tokens of one request; queue time runs from `add_request` to the first start. Owner: the engine
thread.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping

from inference.outputs import SchedulerOutput, StepOutput
from inference.request import FinishReason, Request

_RATE_WINDOW_S = 5.0
_HIT_WINDOW_S = 900.0
_HIT_BUCKET_S = 10.0
_RECENT_REQUESTS = 500
_RECENT_GAPS = 2000
# Weight of the newest step in the smoothed step times.
_SMOOTHING = 0.1

COUNTERS = (
    "steps",
    "step_failures",
    "requests_started",
    "requests_finished",
    "requests_aborted",
    "requests_failed",
    "requests_rejected",
    "preemptions",
    "prompt_tokens",
    "cached_prompt_tokens",
    "computed_tokens",
    "generated_tokens",
    "draft_tokens_proposed",
    "draft_tokens_accepted",
    "recomputed_tokens",
    "blocks_evicted",
)


class Metrics:
    def __init__(self) -> None:
        self.totals: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.step_host_ms = 0.0
        self.step_forward_ms = 0.0
        # (start of the step, prompt tokens, sampled tokens)
        self._steps: deque[tuple[float, int, int]] = deque()
        self._num_prefill = 0
        self._num_decode = 0
        # (bucket's start, prompt tokens, of them found in the cache)
        self._prompts: deque[list[float]] = deque()
        self._ttft_s: deque[float] = deque(maxlen=_RECENT_REQUESTS)
        self._itl_s: deque[float] = deque(maxlen=_RECENT_GAPS)
        self._run_s: deque[float] = deque(maxlen=50)
        self._last_token_s: dict[str, float] = {}
        self._percentiles: tuple[float, Mapping[str, float | None], Mapping[str, float | None]]
        self._percentiles = (-math.inf, percentiles(()), percentiles(()))

    def on_step(
        self,
        output: SchedulerOutput,
        step_output: StepOutput,
        num_sampled: int,
        start_s: float,
        end_s: float,
    ) -> None:
        drafted = [len(part.draft_token_ids) for part in output.scheduled]
        num_prefill = output.num_tokens - sum(
            [
                part.num_new_tokens
                for part, num_draft in zip(output.scheduled, drafted, strict=True)
                if part.num_new_tokens == 1 + num_draft and part.samples
            ]
        )
        forward_s = step_output.forward_s
        self.totals["draft_tokens_proposed"] += sum(drafted)
        self.totals["draft_tokens_accepted"] += sum(step_output.num_accepted.values())
        self.totals["steps"] += 1
        self.totals["computed_tokens"] += output.num_tokens
        self.totals["generated_tokens"] += num_sampled
        self._steps.append((start_s, num_prefill, num_sampled))
        self._num_prefill += num_prefill
        self._num_decode += num_sampled
        host_ms = max(0.0, end_s - start_s - forward_s) * 1000.0
        self.step_host_ms += _SMOOTHING * (host_ms - self.step_host_ms)
        self.step_forward_ms += _SMOOTHING * (forward_s * 1000.0 - self.step_forward_ms)

    def on_started(self, request: Request, now_s: float) -> None:
        self.totals["requests_started"] += 1
        self.totals["prompt_tokens"] += request.num_prompt_tokens
        self.totals["cached_prompt_tokens"] += request.num_cached_tokens
        if not self._prompts or now_s - self._prompts[-1][0] >= _HIT_BUCKET_S:
            self._prompts.append([now_s, 0, 0])
        self._prompts[-1][1] += request.num_prompt_tokens
        self._prompts[-1][2] += request.num_cached_tokens

    def on_token(self, request: Request, now_s: float) -> None:
        last_s = self._last_token_s.get(request.request_id)
        self._last_token_s[request.request_id] = now_s
        if last_s is None:
            self._ttft_s.append(now_s - request.arrival_s)
        else:
            self._itl_s.append(now_s - last_s)

    def on_ended(self, request: Request) -> None:
        self._last_token_s.pop(request.request_id, None)
        if request.finish_reason in (FinishReason.ERROR, FinishReason.REFUSED):
            self.totals["requests_failed"] += 1
        elif request.finish_reason is FinishReason.ABORT:
            self.totals["requests_aborted"] += 1
        else:
            self.totals["requests_finished"] += 1
        if request.first_scheduled_s is not None and request.finished_s is not None:
            self._run_s.append(request.finished_s - request.first_scheduled_s)

    def rates(self, now_s: float) -> tuple[float, float]:
        """(prompt tokens/s, sampled tokens/s) over the last few seconds."""
        while self._steps and self._steps[0][0] < now_s - _RATE_WINDOW_S:
            _, num_prefill, num_decode = self._steps.popleft()
            self._num_prefill -= num_prefill
            self._num_decode -= num_decode
        if not self._steps:
            return 0.0, 0.0
        span_s = max(0.1, now_s - self._steps[0][0])
        return self._num_prefill / span_s, self._num_decode / span_s

    def cache_hit_rate(self, now_s: float) -> float | None:
        while self._prompts and self._prompts[0][0] < now_s - _HIT_WINDOW_S:
            self._prompts.popleft()
        total = sum(bucket[1] for bucket in self._prompts)
        return sum(bucket[2] for bucket in self._prompts) / total if total else None

    def times(self, now_s: float) -> tuple[Mapping[str, float | None], Mapping[str, float | None]]:
        """Percentiles of (TTFT, ITL), worked out at most once a second."""
        if now_s - self._percentiles[0] >= 1.0:
            self._percentiles = (now_s, percentiles(self._ttft_s), percentiles(self._itl_s))
        return self._percentiles[1], self._percentiles[2]

    def seconds_per_start(self, num_running: int) -> float | None:
        """How often a waiting request starts when all slots are taken; None without a basis."""
        if not self._run_s:
            return None
        return sum(self._run_s) / len(self._run_s) / max(1, num_running)


def percentiles(values: "deque[float] | tuple[float, ...]") -> Mapping[str, float | None]:
    ordered = sorted(values)
    if not ordered:
        return {"p50": None, "p95": None}
    last = len(ordered) - 1
    return {"p50": ordered[round(0.5 * last)], "p95": ordered[round(0.95 * last)]}
