"""Requests as consoles get them: running, waiting, and those that ended in the last minutes.

Each field of a row carries the tick of its last change. Times are seconds since the feed's start.
Segments say which phase began when, and in which slot, so that a page opened now can draw the
slots of the last minutes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

FIELDS = (
    "id",
    "owner",
    "from",
    "class",
    "state",
    "slot",
    "prompt",
    "cached",
    "computed",
    "written",
    "blocks",
    "own",
    "position",
    "since",
    "ttft",
    "speed",
    "preempted",
    "segments",
    "ended",
    "reason",
    # Why it waits: a word, blocks needed, and of the next in line blocks available and kept free.
    "wait",
)
_INDEX = {name: number for number, name in enumerate(FIELDS)}
_ENGINE_FIELDS = {
    "class": "request_class",
    "state": "state",
    "slot": "slot",
    "prompt": "num_prompt_tokens",
    "cached": "num_cached_tokens",
    "computed": "num_computed_tokens",
    "written": "num_output_tokens",
    "blocks": "num_blocks",
    "own": "num_own_blocks",
    "position": "queue_position",
    "preempted": "num_preemptions",
}
QUEUED, PREFILL, DECODE, PREEMPTED = range(4)
_PHASES = {"waiting": QUEUED, "prefill": PREFILL, "decode": DECODE, "preempted": PREEMPTED}
_NO_SLOT = -1
# Of fewer written tokens the speed says little: the first come at once.
_LEAST_FOR_SPEED = 8

# How long an ended request stays known, and how much of that a fresh page gets.
KEEP_ENDED_S = 900.0
FRESH_PAGE_S = 150.0
MAX_ROWS = 4000
_ENDINGS = {"finished": "stop", "aborted": "abort", "failed": "error"}
# What an event of a request may tell, by our name.
_EVENT_FIELDS = {"cached": "cached_tokens", "prompt": "prompt_tokens", "written": "output_tokens"}


@dataclass(slots=True)
class Row:
    handle: int
    values: list[Any] = field(default_factory=lambda: [None] * len(FIELDS))
    versions: list[int] = field(default_factory=lambda: [-1] * len(FIELDS))
    version: int = -1

    def get(self, name: str) -> Any:
        return self.values[_INDEX[name]]

    def put(self, name: str, value: Any, tick: int) -> None:
        index = _INDEX[name]
        if self.values[index] != value:
            self.values[index] = value
            self.versions[index] = self.version = tick

    @property
    def ended(self) -> float | None:
        return self.get("ended")


class RequestLog:
    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}
        # Handles of requests that the block map named before the list of requests did, too.
        self._handles: dict[str, int] = {}
        self._next_handle = 0

    def handle_of(self, request_id: str) -> int:
        handle = self._handles.get(request_id)
        if handle is None:
            handle = self._handles[request_id] = self._next_handle
            self._next_handle += 1
        return handle

    def rows(self) -> Iterable[Row]:
        return self._rows.values()

    def find(self, request_id: str) -> Row | None:
        return self._rows.get(request_id)

    def observe(
        self, requests: Iterable[Mapping[str, Any]], num_waiting: int, now: float, tick: int
    ) -> None:
        """Take the engine's list over: all that run, and the first of `num_waiting` that wait."""
        present: set[str] = set()
        num_listed = 0
        for info in requests:
            request_id = str(info["request_id"])
            present.add(request_id)
            num_listed += info.get("queue_position") is not None
            self._observe_one(request_id, info, now, tick)
        for request_id, row in self._rows.items():
            if row.ended is not None or request_id in present:
                continue
            # One that waits may only have moved past the end of the list; its end is an event.
            if row.get("position") is None or num_listed >= num_waiting:
                self._end(row, now, "stop", tick)
        self._forget(now)

    def observe_event(self, event: Mapping[str, Any], at: float, tick: int) -> None:
        """Learn from an event what a look four times a second misses: short requests, and ends."""
        request_id, kind = event.get("request_id"), event["kind"]
        if request_id is None or kind not in ("admitted", *_ENDINGS):
            return
        data = event.get("data") or {}
        row = self._rows.get(request_id)
        if row is None:
            row = self._new_row(request_id, event.get("labels") or {}, tick)
            waited = data.get("seconds", data.get("queue_s", 0.0))
            row.put("since", round(at - float(waited), 2), tick)
        for name, told in _EVENT_FIELDS.items():
            if told in data:
                row.put(name, data[told], tick)
        if kind == "admitted" and row.ended is None:
            slot = int(data.get("slot", _NO_SLOT))
            if slot != _NO_SLOT:
                row.put("slot", slot, tick)
                self._segment(row, PREFILL, slot, at, tick)
        elif kind in _ENDINGS and row.ended is None:
            self._end(row, at, str(data.get("reason") or _ENDINGS[kind]), tick)

    def delta_since(self, base: int, now: float) -> list[list[Any]]:
        """Changed rows, each flat: handle, then field number and value for every changed field."""
        whole = base < 0
        delta: list[list[Any]] = []
        for row in self._rows.values():
            if row.version <= base:
                continue
            if whole and row.ended is not None and row.ended < now - FRESH_PAGE_S:
                continue
            flat: list[Any] = [row.handle]
            for index, version in enumerate(row.versions):
                if version > base:
                    flat += (index, row.values[index])
            delta.append(flat)
        return delta

    def _observe_one(self, request_id: str, info: Mapping[str, Any], now: float, tick: int) -> None:
        row = self._rows.get(request_id)
        if row is None:
            row = self._new_row(request_id, info.get("labels") or {}, tick)
        if row.get("since") is None or row.ended is not None:
            row.put("since", round(now - float(info.get("age_s") or 0.0), 2), tick)
        row.put("ended", None, tick)
        row.put("owner", owner_of(info), tick)
        for name, engine_name in _ENGINE_FIELDS.items():
            row.put(name, info.get(engine_name), tick)
        ttft, speed = info.get("ttft_s"), info.get("tokens_per_s")
        row.put("ttft", None if ttft is None else round(ttft, 3), tick)
        is_known = speed is not None and (info.get("num_output_tokens") or 0) >= _LEAST_FOR_SPEED
        row.put("speed", round(speed, 1) if is_known else None, tick)
        row.put("wait", _wait(info.get("wait")), tick)
        self._follow_phase(row, info, now, tick)

    def _follow_phase(self, row: Row, info: Mapping[str, Any], now: float, tick: int) -> None:
        phase = _PHASES.get(str(info.get("state")), QUEUED)
        segments: list[float] = row.get("segments") or []
        last_phase = segments[-3] if segments else None
        last_slot = int(segments[-2]) if segments else _NO_SLOT
        slot = info.get("slot")
        at = now
        if phase == DECODE and last_phase != DECODE and row.get("ttft") is not None:
            # The first token's time is exact; a look may come up to a second later.
            first_token = row.get("since") + row.get("ttft")
            if last_phase in (None, QUEUED) and slot is not None:
                began = max(row.get("since"), segments[-1] if segments else 0.0)
                self._segment(row, PREFILL, slot, min(began, first_token), tick)
            last_at = (row.get("segments") or [0.0])[-1]
            # An earlier first token was before a preemption: this is when it went on.
            at = min(now, first_token) if first_token >= last_at else now
        if not segments and phase == QUEUED:
            at = row.get("since")
        if phase == PREEMPTED:
            slot = last_slot
        self._segment(row, phase, _NO_SLOT if slot is None else int(slot), at, tick)

    def _segment(self, row: Row, phase: int, slot: int, at: float, tick: int) -> None:
        segments: list[float] = row.get("segments") or []
        if segments and segments[-3] == phase and segments[-2] == slot:
            return
        row.put("segments", [*segments, phase, slot, round(at, 2)], tick)

    def _new_row(self, request_id: str, labels: Mapping[str, str], tick: int) -> Row:
        row = self._rows[request_id] = Row(self.handle_of(request_id))
        row.put("id", request_id, tick)
        row.put("owner", labels.get("user_id") or "someone", tick)
        row.put("from", source_words(labels), tick)
        return row

    def _end(self, row: Row, at: float, reason: str, tick: int) -> None:
        row.put("ended", round(at, 2), tick)
        row.put("reason", reason, tick)
        row.put("state", "ended", tick)
        row.put("wait", None, tick)
        row.put("speed", None, tick)

    def _forget(self, now: float) -> None:
        ended = [
            (row.ended, request_id)
            for request_id, row in self._rows.items()
            if row.ended is not None
        ]
        excess = len(self._rows) - MAX_ROWS
        for number, (at, request_id) in enumerate(sorted(ended)):
            if at < now - KEEP_ENDED_S or number < excess:
                del self._rows[request_id]
                self._handles.pop(request_id, None)


def _wait(told: Mapping[str, Any] | None) -> list[Any] | None:
    if told is None:
        return None
    known = (told.get(name) for name in ("why", "needed", "available", "kept"))
    return [value for value in known if value is not None]


def owner_of(info: Mapping[str, Any]) -> str:
    """The user's id as text where the engine's owner names one, else the owner itself."""
    owner = str(info.get("owner") or "someone")
    return owner.removeprefix("user:")


def source_words(labels: Mapping[str, str]) -> str:
    if labels.get("key_prefix"):
        return f"key {labels['key_prefix']}"
    return labels.get("source") or "unknown"
