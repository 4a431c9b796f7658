"""Prometheus metrics: the engine's state read at the moment of the question, and histograms of
finished generations. Units stand in the names."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from appliance.errors import EngineUnavailable
from appliance.serving.gateway import get_backend

_STATES = ("loading", "ready", "rebuilding", "swapping", "hung", "draining", "dead")
# State key -> (metric, what it says).
_GAUGES = {
    "running": ("requests_running", "Requests that run now."),
    "waiting": ("requests_waiting", "Requests that wait."),
    "prefill_tokens_per_s": ("prefill_tokens_per_second", "Prompt tokens computed a second."),
    "decode_tokens_per_s": ("decode_tokens_per_second", "Answer tokens generated a second."),
    "cache_hit_rate": ("prefix_cache_hit_ratio", "Share of prompt tokens found in the cache."),
    "step_host_ms": ("step_host_milliseconds", "Python part of a step."),
    "step_forward_ms": ("step_forward_milliseconds", "Model part of a step."),
}
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class EngineCollector(Collector):
    """Nothing is measured here: the numbers are those of the console and of `/api/engine`."""

    def collect(self) -> Iterator[Metric]:
        try:
            state = get_backend().state()
        except EngineUnavailable:
            return
        yield from _engine_metrics(state)

    def describe(self) -> list[Metric]:
        return []


def _engine_metrics(state: Mapping[str, Any]) -> Iterator[Metric]:
    current = GaugeMetricFamily(
        "blockhouse_engine_state", "1 for the state the engine is in.", labels=["state"]
    )
    for name in _STATES:
        current.add_metric([name], float(state["state"] == name))
    yield current
    for key, (name, text) in _GAUGES.items():
        if state.get(key) is not None:
            yield GaugeMetricFamily(f"blockhouse_{name}", text, value=state[key])
    slots = state.get("slots") or {}
    if slots:
        yield GaugeMetricFamily(
            "blockhouse_slots", "Requests that may run at once.", value=slots["effective"]
        )
    kv = state.get("kv") or {}
    blocks = GaugeMetricFamily("blockhouse_kv_blocks", "KV blocks by use.", labels=["use"])
    for key in ("used", "cached", "free", "shared"):
        if f"blocks_{key}" in kv:
            blocks.add_metric([key], kv[f"blocks_{key}"])
    yield blocks
    for key, value in (state.get("totals") or {}).items():
        yield CounterMetricFamily(
            f"blockhouse_{key}", f"{key.replace('_', ' ')} since the start.", value=value
        )


# A second number a counter, which says when this process started: known from the process.
disable_created_metrics()
REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
REGISTRY.register(EngineCollector())

_generations = Counter(
    "blockhouse_generations",
    "Generations that ended.",
    ["source", "end"],
    registry=REGISTRY,
)
_tokens = Counter("blockhouse_tokens", "Tokens booked.", ["kind"], registry=REGISTRY)
_ttft = Histogram(
    "blockhouse_time_to_first_token_seconds",
    "From asking the engine to the first text, time in the queue included.",
    buckets=_SECONDS,
    registry=REGISTRY,
)
_queue = Histogram(
    "blockhouse_queue_seconds",
    "From asking the engine to the first step.",
    buckets=_SECONDS,
    registry=REGISTRY,
)
_duration = Histogram(
    "blockhouse_generation_seconds", "Whole generations.", buckets=_SECONDS, registry=REGISTRY
)


def generation_observe(
    *,
    source: str,
    end: str,
    prompt_tokens: int,
    cached_tokens: int,
    completion_tokens: int,
    queue_s: float,
    ttft_s: float | None,
    duration_s: float,
) -> None:
    """Count one generation that ended."""
    _generations.labels(source, end).inc()
    _tokens.labels("prompt").inc(prompt_tokens)
    _tokens.labels("prompt_cached").inc(cached_tokens)
    _tokens.labels("completion").inc(completion_tokens)
    _queue.observe(queue_s)
    _duration.observe(duration_s)
    if ttft_s is not None:
        _ttft.observe(ttft_s)
