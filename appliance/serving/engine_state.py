"""The engine's numbers as JSON-able pictures for the console and `/api/engine`."""

import dataclasses
from collections.abc import Mapping
from typing import Any


def engine_state(stats: Any, model: Mapping[str, Any] | None) -> dict[str, Any]:
    """See README.md for the meaning of every key."""
    return {
        "state": stats.state,
        "progress": stats.progress,
        "error": stats.error,
        "step": stats.step_id,
        "slots": fields_of(stats.slots),
        "settings": {name: fields_of(setting) for name, setting in stats.settings.items()},
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "kv": fields_of(stats.kv),
        "prefill_tokens_per_s": stats.prefill_tokens_per_s,
        "decode_tokens_per_s": stats.decode_tokens_per_s,
        "tokens_per_s": stats.decode_tokens_per_s,
        "cache_hit_rate": stats.cache_hit_rate,
        "ttft_s": dict(stats.ttft_s),
        "itl_s": dict(stats.itl_s),
        "step_host_ms": stats.step_host_ms,
        "step_forward_ms": stats.step_forward_ms,
        "totals": dict(stats.totals),
        "requests": [fields_of(request) for request in stats.requests],
        "prefixes": [
            {**fields_of(prefix), "num_tokens_saved": prefix.num_tokens * prefix.num_hits}
            for prefix in stats.prefixes
        ],
        "model": model,
    }


def fields_of(record: Any) -> dict[str, Any]:
    """Field -> value, one level deep: `asdict` would copy everything below as well."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
