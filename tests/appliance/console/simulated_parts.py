"""What the simulated engine is made of: its model, its settings, one of its requests."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from appliance.serving.types import ModelInfo

BLOCK = 16
PREFIX_BLOCKS = 24
MODEL = ModelInfo(
    name="simulated-8b",
    context_tokens=16_384,
    vocab_size=32_000,
    device="cpu",
    dtype="bfloat16",
    backend="simulated",
    loaded_at=1_700_000_000,
)

SETTINGS: dict[str, Any] = {
    "max_model_len": 16_384,
    "reserved_interactive_slots": 2,
    "max_num_batched_tokens": 2048,
    "max_waiting_requests": 1000,
    "max_waiting_tokens": 2_000_000,
    "enable_prefix_cache": True,
    "policy": "continuous",
    "speculation": "auto",
    "max_running_per_owner": 0,
    "max_blocks_per_owner": 0,
    "kv_memory_share": 0.4,
    "admission_headroom": 0.0,
    "aging_s": 20.0,
    "class_weights": "strict",
    "reserve_tokens": 0,
}

# Of the state, what an engine without a model has instead.
UNLOADED: dict[str, Any] = {
    "slots": {"requested": 0, "effective": 0, "reason": "the model is not loaded"},
    "settings": {},
    "running": 0,
    "waiting": 0,
    "kv": dict.fromkeys(
        ("block_size", "bytes_per_block", "blocks_total", "blocks_used", "blocks_cached",
         "blocks_free", "blocks_shared", "slots_wasted"), 0,
    ),
    "requests": [],
    "prefixes": [],
    "model": None,
}  # fmt: skip


@dataclass
class SimRequest:
    number: int
    owner: str
    labels: dict[str, str]
    request_class: str
    prompt: int
    wanted: int
    arrival: float
    shares: bool
    computed: int = 0
    written: int = 0
    blocks: list[int] = field(default_factory=list)
    slot: int | None = None
    preemptions: int = 0
    cached: int = 0
    first_token: float | None = None
    state: str = "waiting"

    @property
    def request_id(self) -> str:
        return f"r-{self.number:03x}"


def prefixes_of(found_again: Counter[str]) -> list[dict[str, Any]]:
    """Beginnings of prompts that saved the most; `found_again` counts requests by owner."""
    found = [("", PREFIX_BLOCKS * BLOCK, found_again.total())]
    found += [(owner, 1024, hits) for owner, hits in found_again.most_common(4)]
    return [
        {"num_tokens": size, "num_hits": hits, "scope": scope, "num_tokens_saved": size * hits}
        for scope, size, hits in found
        if hits
    ]
