"""A whole test: the levels one after the other, the guard, the slots. Used by task and command."""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import aiohttp

from appliance.capacity.figures import Level, level_of, percentile
from appliance.capacity.load import Load, LoadFailed, Target, run_level, session, warm_up
from appliance.capacity.mix import Mix
from appliance.capacity.plan import MAX_REQUESTS_PER_USER, Plan
from appliance.capacity.probe import ServerProbe
from appliance.capacity.recommend import faults, finer_level

LOOK_EVERY_S = 0.5
# A test that waits for members this long in all is ended: the time is wrong for it.
MAX_HELD_S = 600.0


class RunStopped(Exception):
    """Somebody, or the guard, ended the test; the text says who and why."""


class Watcher(Protocol):
    """Told of everything that happens in a test."""

    async def progress(self, told: dict[str, Any]) -> None:
        """Twice a second. May raise RunStopped."""

    async def level_done(self, level: Level) -> None: ...

    async def slots_held(self, held: dict[str, Any] | None) -> None:
        """The slots are about to be another number ({"before", "set"}), or are as before."""

    async def queue_times(self, since: float, number: int) -> Sequence[float]:
        """Seconds in the queue of about `number` requests since then (`time.time()`)."""


@dataclass(slots=True)
class _Now:
    users: int = 0
    at: int = 0
    load: Load | None = None


class CapacityTest:
    """One run of a plan. `server_pid` is set for the appliance's own server only."""

    def __init__(
        self,
        target: Target,
        mix: Mix,
        plan: Plan,
        watcher: Watcher,
        *,
        is_own: bool = False,
        server_pid: int | None = None,
    ) -> None:
        self._target, self._mix, self._plan, self._watcher = target, mix, plan, watcher
        self._is_own, self._pid = is_own, server_pid
        self._probe: ServerProbe | None = None
        self._now = _Now()
        self._levels: list[Level] = []
        self._next_number = 0
        self._began_s = time.monotonic()

    async def run(self) -> list[Level]:
        """Measure every level. Raises RunStopped, LoadFailed; what was measured was told."""
        async with session(self._target) as client:
            if self._is_own:
                self._probe = ServerProbe(client, self._target.base_url, self._pid)
                await self._probe.look()
                self._target = replace(self._target, context_tokens=self._probe.context_tokens)
            held: dict[str, Any] = {}
            measuring = asyncio.ensure_future(self._measure(client, held))
            watching = asyncio.ensure_future(self._watch())
            try:
                done, _ = await asyncio.wait(
                    (measuring, watching), return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
            finally:
                for task in (measuring, watching):
                    task.cancel()
                await asyncio.gather(measuring, watching, return_exceptions=True)
                if held:
                    await asyncio.shield(self._give_slots_back(held))
        return self._levels

    async def _measure(self, client: aiohttp.ClientSession, held: dict[str, Any]) -> None:
        per_word = await warm_up(self._target, self._mix)
        self._target = replace(self._target, tokens_per_word=per_word)
        for at, users in enumerate(self._plan.levels):
            self._now = _Now(users, at)
            level = await self._level(client, users, held)
            if self._plan.stops_at_limit and faults(level, self._plan.limits):
                break
        finer = finer_level(self._levels, self._plan.limits) if self._plan.stops_at_limit else None
        if finer is not None:
            self._now = _Now(finer, len(self._plan.levels))
            await self._level(client, finer, held, is_added=True)

    async def _level(
        self,
        client: aiohttp.ClientSession,
        users: int,
        held: dict[str, Any],
        is_added: bool = False,
    ) -> Level:
        probe, known = self._probe, dict[str, Any](is_added=is_added)
        if probe is not None:
            await self._raise_slots(probe, users, held)
            probe.begin_level()
        self._now.load = load = Load(users)
        max_requests = users * MAX_REQUESTS_PER_USER
        since = time.time()
        measured_s = await run_level(
            client,
            self._target,
            self._mix,
            load,
            level_s=self._plan.level_s,
            max_requests=max_requests,
            first=self._next_number,
            gate=self._gate,
        )
        self._next_number += max_requests
        if probe is not None:
            await probe.look()
            waits = await self._watcher.queue_times(since, len(load.answers))
            known |= {
                "slots": probe.effective_slots,
                "kv_share": probe.kv_share,
                "memory_bytes": probe.memory_bytes,
                "preemptions": probe.preemptions,
                "queue_p50_s": percentile(waits, 0.5),
                "queue_p95_s": percentile(waits, 0.95),
            }
        level = level_of(load, measured_s, **known)
        self._levels.append(level)
        await self._watcher.level_done(level)
        return level

    async def _gate(self) -> None:
        if self._probe is not None and self._plan.guard_s is not None:
            await self._probe.may_send.wait()

    async def _watch(self) -> None:
        held_since_s: float | None = None
        held_s = 0.0
        while True:
            probe = self._probe
            if probe is not None:
                await probe.look()
                held_since_s, held_s = self._guard(probe, held_since_s, held_s)
            await self._watcher.progress(self._told())
            await asyncio.sleep(LOOK_EVERY_S)

    def _guard(
        self, probe: ServerProbe, held_since_s: float | None, held_s: float
    ) -> tuple[float | None, float]:
        guard_s, now = self._plan.guard_s, time.monotonic()
        if guard_s is None:
            return None, 0.0
        if probe.longest_wait_s > guard_s:
            raise RunStopped(
                f"A member had to wait longer than {guard_s:g} s. Run the test when fewer people "
                "work, or with fewer at the same time."
            )
        if probe.members_waiting:
            probe.may_send.clear()
            held_since_s = now if held_since_s is None else held_since_s
        else:
            probe.may_send.set()
            if held_since_s is not None:
                held_s += now - held_since_s
            held_since_s = None
        if held_s + (0.0 if held_since_s is None else now - held_since_s) > MAX_HELD_S:
            raise RunStopped("Members kept the server busy. Run the test when fewer people work.")
        return held_since_s, held_s

    def _told(self) -> dict[str, Any]:
        load, probe = self._now.load, self._probe
        answers = [] if load is None else load.answers
        begun = answers if load is None else [*answers, *load.open]
        ttfts = [t for answer in begun if (t := answer.ttft_s) is not None]
        share = 0.0 if load is None else min(1.0, load.elapsed_s / self._plan.level_s)
        return {
            "users": self._now.users,
            "level": self._now.at + 1,
            "levels": max(len(self._plan.levels), self._now.at + 1),
            "share": round(min(1.0, (self._now.at + share) / len(self._plan.levels)), 3),
            "level_elapsed_s": 0.0 if load is None else round(load.elapsed_s, 1),
            "elapsed_s": round(time.monotonic() - self._began_s, 1),
            "answered": len(answers),
            "errors": sum(bool(answer.error) for answer in answers),
            "ttft_p95_s": percentile(ttfts, 0.95),
            "members_running": 0 if probe is None else probe.members_running,
            "members_waiting": 0 if probe is None else probe.members_waiting,
        }

    # ---- slots

    async def _raise_slots(self, probe: ServerProbe, users: int, held: dict[str, Any]) -> None:
        effective = probe.effective_slots
        if not self._plan.raises_slots or effective is None or effective >= users:
            return
        held |= {"before": held.get("before", probe.slots.get("requested")), "set": users}
        # Written down first: whoever finds this test dead can give the slots back.
        await self._watcher.slots_held(dict(held))
        await self._patch(probe.set_slots(users))

    async def _give_slots_back(self, held: dict[str, Any]) -> None:
        """Unless somebody chose another number meanwhile."""
        assert self._probe is not None, "slots are held on the own server only"
        try:
            await self._probe.look()
        except LoadFailed:
            return
        if self._probe.slots.get("requested") == held["set"]:
            await self._patch(self._probe.set_slots(held["before"]))
        await self._watcher.slots_held(None)

    async def _patch(self, change: Awaitable[None]) -> None:
        try:
            await change
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
            raise LoadFailed(f"The slots could not be changed: {exc}.") from exc


async def give_slots_back(target: Target, held: dict[str, Any]) -> None:
    """For a test that died while it held the slots. Raises LoadFailed."""
    async with session(target) as client:
        probe = ServerProbe(client, target.base_url, None)
        await probe.look()
        if probe.slots.get("requested") == held["set"]:
            try:
                await probe.set_slots(held["before"])
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
                raise LoadFailed(f"The slots could not be changed: {exc}.") from exc
