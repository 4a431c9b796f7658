"""A busy engine without a model: many users, a real block pool's look, everything moves.

`advance(seconds)` plays time forward; `run()` does so in real time. Requests join and leave,
prompts share a prefix, the newest request is preempted when the pool is full, ended requests
leave cached blocks. State, block map and events have the shape of the real back end's.
"""

import asyncio
import heapq
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from appliance.errors import BadRequest
from tests.appliance.console.simulated_parts import (
    BLOCK,
    MODEL,
    PREFIX_BLOCKS,
    SETTINGS,
    UNLOADED,
    SimRequest,
    prefixes_of,
)


class SimulatedBackend:
    """Implements what the console reads of `Backend`: state, block_map, events, tune, abort."""

    model = MODEL

    def __init__(
        self,
        owners: Sequence[tuple[str, str]],
        *,
        total: int = 4096,
        slots: int = 12,
        seed: int = 3,
        arrivals_per_s: float = 0.35,
        tokens_per_s: float = 66.0,
        prompt: tuple[int, int] = (600, 12_000),
    ) -> None:
        self._rand = random.Random(seed)
        self._owners = owners
        self._total = total
        self._slots = slots
        self._settings = dict(SETTINGS)
        self._arrivals_per_s = arrivals_per_s
        self._speed = tokens_per_s
        self._prompt = prompt
        self.now = 1_000.0
        self.status = "ready"
        # Why it is slower than it could be.
        self.notice = ""
        self.swap: dict[str, Any] | None = None
        self.step = 0
        self._free = list(range(total))
        self._cached: list[int] = []
        self._prefix: list[int] = []
        self._running: list[SimRequest] = []
        self._waiting: list[SimRequest] = []
        self._events: list[dict[str, Any]] = []
        self._num_requests = 0x3F0
        self._hits = [0, 0]
        self._found_again: Counter[str] = Counter()
        self._ttfts: list[float] = []
        self._num_preemptions = 0
        self.owner_weights: dict[str, float] = {}

    # ---- Backend

    def state(self) -> Mapping[str, Any]:
        return self._state() | (UNLOADED if self.status == "loading" else {})

    def _state(self) -> dict[str, Any]:
        used = self._used_blocks()
        wasted = sum(len(r.blocks) * BLOCK - self._own_tokens(r) for r in self._running)
        ttfts = sorted(self._ttfts[-100:])
        kv = {
            "block_size": BLOCK,
            "bytes_per_block": 2 * 1024 * 1024,
            "blocks_total": self._total,
            "blocks_used": used,
            "blocks_cached": len(self._cached),
            "blocks_free": len(self._free),
            "blocks_shared": len(self._prefix) if self._num_sharing() > 1 else 0,
            "slots_wasted": max(0, wasted),
        }
        decoding = sum(r.state == "decode" for r in self._running)
        return {
            "state": self.status,
            "step": self.step,
            "progress": [0.58, "reading the weights"] if self.status == "loading" else [1.0, ""],
            "error": "The machine ran out of memory." if self.status == "dead" else None,
            "slots": {"requested": self._slots, "effective": self._slots, "reason": ""},
            "settings": {
                name: {"requested": value, "effective": value, "reason": ""}
                for name, value in self._settings.items()
            },
            "running": len(self._running),
            "waiting": len(self._waiting),
            "kv": kv,
            "prefill_tokens_per_s": 2400.0 * (len(self._running) - decoding),
            "decode_tokens_per_s": decoding * self._speed,
            "tokens_per_s": decoding * self._speed,
            "cache_hit_rate": self._hits[0] / self._hits[1] if self._hits[1] else None,
            "ttft_s": {"p50": _at(ttfts, 0.5), "p95": _at(ttfts, 0.95)},
            "itl_s": {"p50": 1 / self._speed, "p95": 1.6 / self._speed},
            "step_host_ms": 0.4,
            "step_forward_ms": 14.2,
            "totals": {"requests_failed": 0, "preemptions": self._num_preemptions},
            "swap": self.swap,
            "prefixes": prefixes_of(self._found_again),
            "requests": [self._info(r) for r in (*self._running, *self._waiting)],
            "model": {
                "name": MODEL.name,
                "context_tokens": MODEL.context_tokens,
                "device": MODEL.device,
                "dtype": MODEL.dtype,
                "notice": self.notice,
            },
        }

    def block_map(self) -> Mapping[str, Any]:
        if self.status == "loading":
            return {"step": 0, "cells": [], "holders": [], "partial": {}, "token_start": {}}
        cells = [-1] * self._total
        holders: list[list[str]] = []
        partial: dict[int, int] = {}
        token_start: dict[int, int] = {}
        for block in self._cached:
            cells[block] = -2
        sharing = [r.request_id for r in self._running if r.shares and r.blocks]
        if sharing:
            holders.append(sharing)
            for place, block in enumerate(self._prefix):
                cells[block] = 0
                token_start[block] = place * BLOCK
        for request in self._running:
            offset = PREFIX_BLOCKS if request.shares else 0
            holders.append([request.request_id])
            for place, block in enumerate(request.blocks):
                cells[block] = len(holders) - 1
                token_start[block] = (offset + place) * BLOCK
            left = self._own_tokens(request) % BLOCK
            if request.blocks and left:
                partial[request.blocks[-1]] = left
        return {
            "step": self.step,
            "cells": cells,
            "holders": holders,
            "partial": partial,
            "token_start": token_start,
        }

    def events_since(self, event_id: int) -> Sequence[Mapping[str, Any]]:
        return [event for event in self._events if event["event_id"] > event_id]

    def tune(self, changes: Mapping[str, Any]) -> None:
        if "owner_weights" in changes:
            self.owner_weights = dict(changes["owner_weights"])
            return
        for name, value in changes.items():
            known = SETTINGS.get(name) if name != "slots" else 1
            if known is None:
                raise BadRequest(f"{name} is no live setting; there is slots, and others.")
            if name == "class_weights" and isinstance(value, Mapping):
                continue
            if isinstance(value, bool | str) or isinstance(known, bool | str):
                if type(value) is not type(known):
                    raise BadRequest(f"{name} is {value!r}; another kind of value is allowed.")
            elif not isinstance(value, type(known) if isinstance(known, int) else int | float):
                raise BadRequest(f"{name} is {value!r}; another kind of value is allowed.")
            if name == "slots" and not 1 <= value <= 4096:
                raise BadRequest(f"{name} is {value!r}; slots from 1 to 4096 is allowed.")
        self._settings.update({name: v for name, v in changes.items() if name != "slots"})
        self._slots = changes.get("slots", self._slots)
        self._event("tuned", None, {name: str(value) for name, value in changes.items()})

    def swap_model(self, name: str, *args: Any, **options: Any) -> None:
        """Begins a change that a test ends by setting `swap`."""
        self.swap = {"model": name, "stage": "loading", "began_at": 0.0, "error": None}

    def abort(self, request_id: str, reason: str = "abort") -> bool:
        for request in (*self._running, *self._waiting):
            if request.request_id == request_id:
                self._end(request, "aborted", "abort", reason)
                return True
        return False

    # ---- time

    def advance(self, seconds: float, tick: float = 0.1) -> None:
        for _ in range(round(seconds / tick)):
            self.now += tick
            self.step += 6
            if self._rand.random() < self._arrivals_per_s * tick:
                self._arrive()
            self._admit()
            for request in list(self._running):
                self._compute(request, tick)

    async def run(self, tick: float = 0.1) -> None:
        while True:
            await asyncio.sleep(tick)
            if self.status in ("ready", "draining"):
                self.advance(tick, tick)

    # ---- the engine's part

    def _arrive(self) -> None:
        owner, name = self._rand.choice(self._owners)
        is_chat = self._rand.random() < 0.6
        labels = {"username": name, "user_id": owner, "source": "chat" if is_chat else "api"}
        if not is_chat:
            labels["key_prefix"] = "bh_" + name[:2].title() + "7Q"
        self._num_requests += 1
        low, high = self._prompt
        request = SimRequest(
            number=self._num_requests,
            owner=f"user:{owner}",
            labels=labels,
            request_class="interactive" if is_chat else "api",
            prompt=int(low + (high - low) * self._rand.random() ** 2),
            wanted=int(60 + 3600 * self._rand.random() ** 3),
            arrival=self.now,
            shares=is_chat,
        )
        self._waiting.append(request)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            request = self._waiting[0]
            needed = -(-request.prompt // BLOCK) + 1
            if needed > len(self._free) + len(self._cached):
                return
            self._waiting.pop(0)
            taken = {r.slot for r in self._running}
            request.slot = next(s for s in range(self._slots) if s not in taken)
            request.state = "prefill"
            if request.shares:
                if not self._prefix:
                    self._prefix = [self._take() for _ in range(PREFIX_BLOCKS)]
                else:
                    request.cached = request.computed = min(PREFIX_BLOCKS * BLOCK, request.prompt)
            self._hits[0] += request.cached
            self._hits[1] += request.prompt
            if request.cached:
                # A conversation goes on: its owner's own text behind the text of all.
                self._found_again[request.owner] += 1
            self._running.append(request)
            own = request.prompt - (PREFIX_BLOCKS * BLOCK if request.shares else 0)
            request.blocks = [self._take() for _ in range(max(0, -(-own // BLOCK)))]
            self._event(
                "admitted",
                request,
                {
                    "queue_s": self.now - request.arrival,
                    "cached_tokens": request.cached,
                    "slot": request.slot,
                },
            )

    def _compute(self, request: SimRequest, tick: float) -> None:
        if request not in self._running:
            return
        if request.state == "prefill":
            request.computed = min(
                request.prompt + request.written, request.computed + int(4000 * tick)
            )
            if request.computed == request.prompt + request.written:
                request.state = "decode"
                if request.first_token is None:
                    request.first_token = self.now
                    self._ttfts.append(self.now - request.arrival)
        else:
            new = max(1, round(self._speed * tick * (0.8 + 0.4 * self._rand.random())))
            request.written += new
            request.computed += new
        needed = -(-self._own_tokens(request) // BLOCK)
        while len(request.blocks) < needed:
            if not self._free and not self._cached:
                victim = self._running[-1]
                self._preempt(victim)
                if victim is request:
                    return
                continue
            request.blocks.append(self._take())
        if request.written >= request.wanted:
            self._end(request, "finished", "stop", "")

    def _take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        return self._cached.pop(0)

    def _give_back(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            heapq.heappush(self._free, block)

    def _preempt(self, request: SimRequest) -> None:
        self._running.remove(request)
        request.state, request.preemptions = "preempted", request.preemptions + 1
        self._num_preemptions += 1
        lost, request.computed = request.computed, 0
        num_blocks, left = len(request.blocks), max(1, len(self._running))
        self._give_back(request.blocks)
        request.blocks, request.slot = [], None
        self._waiting.insert(0, request)
        self._event(
            "preempted",
            request,
            {"tokens_lost": lost, "blocks": num_blocks, "setting": "slots", "value": left},
        )

    def _end(self, request: SimRequest, kind: str, reason: str, detail: str) -> None:
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        full = request.blocks[:-1]
        kept = full[: len(full) // 3]
        self._cached.extend(kept)
        self._give_back(set(request.blocks) - set(kept))
        data = {
            "reason": reason,
            "detail": detail,
            "prompt_tokens": request.prompt,
            "output_tokens": request.written,
            "seconds": self.now - request.arrival,
        }
        self._event(kind, request, data)
        request.blocks = []
        if not self._num_sharing() and self._prefix:
            self._cached.extend(self._prefix)
            self._prefix = []

    # ---- helpers

    def _num_sharing(self) -> int:
        return sum(r.shares for r in self._running)

    def _own_tokens(self, request: SimRequest) -> int:
        return max(0, request.computed - (PREFIX_BLOCKS * BLOCK if request.shares else 0))

    def _used_blocks(self) -> int:
        return sum(len(r.blocks) for r in self._running) + len(self._prefix)

    def live_labels(self) -> list[dict[str, str]]:
        return [r.labels for r in (*self._running, *self._waiting)]

    def _info(self, r: SimRequest) -> dict[str, Any]:
        return {
            "request_id": r.request_id,
            "owner": r.owner,
            "labels": r.labels,
            "request_class": r.request_class,
            "state": r.state,
            "slot": r.slot,
            "num_prompt_tokens": r.prompt,
            "num_cached_tokens": r.cached,
            "num_computed_tokens": r.computed,
            "num_output_tokens": r.written,
            "num_blocks": len(r.blocks) + (PREFIX_BLOCKS if r.shares and r.blocks else 0),
            "num_own_blocks": len(r.blocks),
            "queue_position": self._waiting.index(r) if r in self._waiting else None,
            "age_s": self.now - r.arrival,
            "ttft_s": None if r.first_token is None else r.first_token - r.arrival,
            "tokens_per_s": self._speed if r.state == "decode" else None,
            "num_preemptions": r.preemptions,
            "wait": self._wait(r) if r in self._waiting else None,
        }

    def _wait(self, r: SimRequest) -> dict[str, Any]:
        needed = -(-r.prompt // BLOCK) + 1
        if len(self._running) >= self._slots:
            return {"why": "slots", "needed": needed}
        available = len(self._free) + len(self._cached)
        if r is not self._waiting[0] or needed <= available:
            return {"why": "turn", "needed": needed}
        return {"why": "memory", "needed": needed, "available": available, "kept": 0}

    def _event(self, kind: str, request: SimRequest | None, data: dict[str, Any]) -> None:
        self._events.append(
            {
                "event_id": len(self._events) + 1,
                "kind": kind,
                "at": time.time(),
                "request_id": request.request_id if request else None,
                "labels": request.labels if request else {},
                "data": data,
            }
        )


def _at(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
