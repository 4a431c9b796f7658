"""The whole picture that consoles see, kept so that a delta for any earlier tick is cheap.

A tick is one look at the engine. `delta_since(tick)` holds what changed after it; a console that
is too far behind, or new, gets everything.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from appliance.console.block_cells import BlockCells
from appliance.console.capacity_traffic import CapacityTraffic, is_of_test
from appliance.console.event_words import Worded, event_words
from appliance.console.memory_waits import MemoryWaits
from appliance.console.prefix_rows import EVERYBODY, prefix_rows
from appliance.console.request_log import FIELDS, RequestLog
from appliance.console.samples import COLUMNS, Sample, Samples

NEVER = -1
KEEP_EVENTS = 200
FRESH_PAGE_EVENTS = 50
# A console further behind than this gets the whole picture: five minutes of live looks.
MAX_BEHIND = 1200
# After somebody's own change was announced by name, the engine's event about it says it again.
_ANNOUNCED_S = 2.0
_EVICTIONS_EVERY_S = 30.0


class Picture:
    def __init__(self) -> None:
        self.tick = 0
        self.now = 0.0
        self.requests = RequestLog()
        self.cells = BlockCells(self.requests.handle_of)
        self.samples = Samples()
        # The newest sample, until the feed takes it for the roll-ups.
        self.new_sample: Sample | None = None
        self._values: dict[str, tuple[Any, int]] = {}
        self._users: dict[str, tuple[list[Any], int]] = {}
        # (tick, [number, unix seconds, tone, icon, text])
        self._events: deque[tuple[int, list[Any]]] = deque(maxlen=KEEP_EVENTS)
        self._num_events = 0
        self._memory_waits = MemoryWaits()
        self._capacity_traffic = CapacityTraffic()
        self._slots: int | None = None
        self._announced_at = -_ANNOUNCED_S
        self._evicted_told_at = -_EVICTIONS_EVERY_S
        self._evicted_blocks = 0

    def observe(
        self,
        state: Mapping[str, Any],
        block_map: Mapping[str, Any] | None,
        events: Iterable[Mapping[str, Any]],
        *,
        now: float,
        epoch: float,
    ) -> None:
        """Take one look over. `now` is seconds since the feed's start at `epoch` (unix seconds)."""
        self.tick += 1
        self.now = round(now, 2)
        tick = self.tick
        self._slots = (state.get("slots") or {}).get("effective")
        for event in events:
            self.requests.observe_event(event, float(event["at"]) - epoch, tick)
            self._tell(event)
        waiting = int(state.get("waiting") or 0)
        requests = state.get("requests") or ()
        self.requests.observe(requests, waiting, now, tick)
        for worded in self._memory_waits.observe(requests):
            self._add_event(worded, epoch + now)
        self.new_sample = self.samples.observe(state, self.now, tick)
        for name, value in state.items():
            if name == "prefixes":
                self._put(name, prefix_rows(value))
            elif name != "requests":
                self._put(name, _rounded(value))
        if block_map is not None:
            block_size = int((state.get("kv") or {}).get("block_size") or 16)
            self.cells.observe(block_map, block_size, tick)
        self.cells.forget_before(tick - MAX_BEHIND)

    def expect_own_change(self) -> None:
        """Somebody's change is under way and will be announced by name."""
        self._announced_at = self.now

    def announce(self, worded: Worded, at_unix: float) -> None:
        """Add a line about what an admin did; consoles get it with the next look."""
        self._announced_at = self.now
        self._add_event(worded, at_unix, self.tick + 1)

    def unknown_owners(self) -> set[str]:
        shown = {str(row.get("owner")) for row in self.requests.rows()}
        prefixes, _ = self._values.get("prefixes", ((), 0))
        return (shown | {row[0] for row in prefixes}) - self._users.keys() - {EVERYBODY}

    def put_users(self, users: Mapping[str, list[Any]]) -> None:
        """Name and mark (hue, shape) of owners, as consoles show them."""
        for owner, entry in users.items():
            if self._users.get(owner, (None,))[0] != entry:
                self._users[owner] = (entry, self.tick)

    def owner_name(self, request_id: str) -> str:
        row = self.requests.find(request_id)
        entry = self._users.get(str(row.get("owner"))) if row else None
        return str(entry[0][0]) if entry else "someone"

    def written(self, request_id: str) -> int:
        """Tokens that the request had written at the last look."""
        row = self.requests.find(request_id)
        return int(row.get("written") or 0) if row else 0

    def delta_since(self, base: int) -> dict[str, Any]:
        """What a console whose last tick was `base` lacks; `NEVER` and the far behind get all."""
        if base < self.tick - MAX_BEHIND:
            base = NEVER
        delta: dict[str, Any] = {"base": base, "tick": self.tick, "now": self.now}
        if base == NEVER:
            delta["fields"] = FIELDS
            delta["columns"] = COLUMNS
        events = [entry for tick, entry in self._events if tick > base]
        if base == NEVER:
            events = events[-FRESH_PAGE_EVENTS:]
        changed = {
            "state": {name: value for name, (value, tick) in self._values.items() if tick > base},
            "users": {owner: entry for owner, (entry, tick) in self._users.items() if tick > base},
            "rows": self.requests.delta_since(base, self.now),
            "events": events,
            "samples": self.samples.delta_since(base),
        }
        delta.update({name: part for name, part in changed.items() if part})
        delta["map"] = self.cells.delta_since(base)
        return delta

    def _put(self, name: str, value: Any) -> None:
        known = self._values.get(name)
        if known is None or known[0] != value:
            self._values[name] = (value, self.tick)

    def _tell(self, event: Mapping[str, Any]) -> None:
        if is_of_test(event):
            for worded in self._capacity_traffic.observe(event):
                self._add_event(worded, float(event["at"]))
            return
        if event["kind"] == "tuned" and self.now - self._announced_at < _ANNOUNCED_S:
            return
        if event["kind"] == "evicted":
            # A full pool gives blocks away at every step: one line for all since the last line.
            self._evicted_blocks += int(event["data"]["blocks"])
            if self.now - self._evicted_told_at < _EVICTIONS_EVERY_S:
                return
            event = {**event, "data": {"blocks": self._evicted_blocks}}
            self._evicted_blocks, self._evicted_told_at = 0, self.now
        if event["kind"] == "preempted":
            event = {**event, "data": {**event["data"], "slots": self._slots}}
        worded = event_words(event)
        if worded:
            self._add_event(worded, float(event["at"]))

    def _add_event(self, worded: Worded, at_unix: float, tick: int | None = None) -> None:
        self._num_events += 1
        entry = [self._num_events, round(at_unix, 1), *worded]
        self._events.append((self.tick if tick is None else tick, entry))


def _rounded(value: Any) -> Any:
    """Floats to three places: more would be sent four times a second and never be shown."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, Mapping):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return value
