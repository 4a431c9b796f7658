"""What other settings would have meant for the last hour's real requests: a calculation.

Requests arrive when they did and take as long as they did; slots, memory and limits differ. That
answers "who would have waited, who would not have fitted", not how much slower each answer gets
when more run together. A request counts with the blocks of its whole length from its start on,
and with nothing shared, so nobody is preempted in the replay.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from appliance.console.request_log import PREEMPTED, QUEUED, Row

WAITED_S = 0.5
# More of the newest requests than these would tell nothing new.
MAX_REQUESTS = 2000
LAST_S = 3600.0


@dataclass(frozen=True, slots=True)
class Past:
    """One request of the past: when it came, for how long it was computed, its tokens."""

    came: float
    took: float
    is_interactive: bool
    owner: str = ""
    prompt: int = 0
    written: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The settings to try. 0 is no limit."""

    slots: int
    reserved: int = 0
    context_tokens: int = 0
    per_owner: int = 0
    # Share of the pool that a start leaves free.
    headroom: float = 0.0
    blocks: int = 0
    block_size: int = 16

    def tokens_of(self, past: Past) -> int:
        tokens = past.prompt + past.written
        return min(tokens, self.context_tokens) if self.context_tokens else tokens

    def blocks_of(self, past: Past) -> int:
        return -(-self.tokens_of(past) // self.block_size) if self.blocks else 0

    def is_refused(self, past: Past) -> bool:
        """Its prompt leaves no room for an answer."""
        too_long = 0 < self.context_tokens <= past.prompt
        return too_long or (self.blocks > 0 and self.blocks_of(past) > self.blocks)


@dataclass(frozen=True, slots=True)
class Outcome:
    requests: int
    # Started at once, or after less than half a second, which people do not notice.
    fitted: int
    waited: int
    # Too long for the context limit or the memory; and answers that the limit would have cut.
    refused: int
    cut: int
    longest_s: float
    p95_s: float


def past_requests(rows: Iterable[Row], now: float) -> list[Past]:
    """Requests that were started, in the order of their arrival."""
    found = []
    for row in rows:
        segments = row.get("segments") or []
        parts = [segments[at : at + 3] for at in range(0, len(segments), 3)]
        ends = [part[2] for part in parts[1:]] + [row.ended if row.ended is not None else now]
        # One that started this very moment took no time yet, and counts all the same.
        computed = [
            max(0.0, end - part[2])
            for part, end in zip(parts, ends, strict=True)
            if part[0] not in (QUEUED, PREEMPTED)
        ]
        if computed:
            found.append(
                Past(
                    float(row.get("since")),
                    sum(computed),
                    row.get("class") == "interactive",
                    str(row.get("owner")),
                    int(row.get("prompt") or 0),
                    int(row.get("written") or 0),
                )
            )
    return sorted(found, key=lambda past: past.came)


def replay(requests: list[Past], rules: Rules) -> Outcome:
    """First come, first served; the last `reserved` free slots only for interactive requests."""
    served = [past for past in requests[-MAX_REQUESTS:] if not rules.is_refused(past)]
    limit = rules.context_tokens
    cut = sum(0 < limit < past.prompt + past.written for past in served)
    waits = sorted(_Run(rules).waits(served))
    waited = sum(wait > WAITED_S for wait in waits)
    number = len(requests[-MAX_REQUESTS:])
    return Outcome(
        requests=number,
        fitted=len(waits) - waited,
        waited=waited,
        refused=number - len(served),
        cut=cut,
        longest_s=round(waits[-1], 2) if waits else 0.0,
        p95_s=round(waits[int(0.95 * (len(waits) - 1))], 2) if waits else 0.0,
    )


@dataclass(slots=True)
class _Run:
    """The server in the replay."""

    rules: Rules
    # (end, tie-break, request) of those that run, the next end first.
    running: list[tuple[float, int, Past]] = field(default_factory=list)
    waiting: list[Past] = field(default_factory=list)
    num_blocks: int = 0
    owners: Counter[str] = field(default_factory=Counter)
    num_started: int = 0

    def waits(self, requests: list[Past]) -> list[float]:
        """Seconds that each waited."""
        waits: list[float] = []
        left = list(reversed(requests))
        while left or self.waiting:
            if self.running and (not left or self.running[0][0] <= left[-1].came):
                now, _, ended = heapq.heappop(self.running)
                self.num_blocks -= self.rules.blocks_of(ended)
                self.owners[ended.owner] -= 1
            else:
                now = left[-1].came
                self.waiting.append(left.pop())
            while (chosen := self._next()) is not None:
                waits.append(now - chosen.came)
                self._start(chosen, now)
        return waits

    def _next(self) -> Past | None:
        rules = self.rules
        free = rules.slots - len(self.running)
        if free < 1:
            return None
        reserved = min(rules.reserved, rules.slots - 1)
        for past in self.waiting:
            if not past.is_interactive and free <= reserved:
                continue
            if 0 < rules.per_owner <= self.owners[past.owner]:
                continue
            # Smaller ones behind it wait as well, or a large one would never find room.
            return past if self._has_room(past) else None
        return None

    def _has_room(self, past: Past) -> bool:
        rules = self.rules
        if not rules.blocks or not self.running:
            return True
        kept = int(rules.headroom * rules.blocks)
        return self.num_blocks + rules.blocks_of(past) + kept <= rules.blocks

    def _start(self, past: Past, now: float) -> None:
        self.waiting.remove(past)
        self.num_started += 1
        heapq.heappush(self.running, (now + past.took, self.num_started, past))
        self.num_blocks += self.rules.blocks_of(past)
        self.owners[past.owner] += 1
