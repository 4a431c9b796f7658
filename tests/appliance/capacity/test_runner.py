"""A whole test against a scripted server: levels, the guard for members, the slots."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from appliance.capacity import runner
from appliance.capacity.figures import Level
from appliance.capacity.load import LoadFailed, Target
from appliance.capacity.mix import CHAT
from appliance.capacity.plan import Plan
from appliance.capacity.recommend import Limits
from appliance.capacity.runner import CapacityTest, RunStopped, give_slots_back
from tests.appliance.capacity.scripted_openai import ScriptedServer, scripted_server

ANY = Limits(ttft_p95_s=None, itl_p95_s=None)
MEMBER = {"labels": {"source": "chat"}, "request_class": "interactive"}


class Watcher:
    def __init__(self) -> None:
        self.levels: list[Level] = []
        self.told: list[dict[str, Any]] = []
        self.held: list[dict[str, Any] | None] = []
        self.stop: str | None = None

    async def progress(self, told: dict[str, Any]) -> None:
        self.told.append(told)
        if self.stop:
            raise RunStopped(self.stop)

    async def level_done(self, level: Level) -> None:
        self.levels.append(level)

    async def slots_held(self, held: dict[str, Any] | None) -> None:
        self.held.append(held)

    async def queue_times(self, since: float, number: int) -> Sequence[float]:
        return [0.5] * number


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LOOK_EVERY_S", 0.01)


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as server:
        server.state = {
            "state": "ready",
            "slots": {"requested": "auto", "effective": 2},
            "kv": {"blocks_total": 100, "blocks_used": 40},
            "totals": {"preemptions": 3},
            "requests": [],
            "model": {"context_tokens": 2048},
        }
        yield server


def test_of(server: ScriptedServer, watcher: Watcher, **plan: Any) -> CapacityTest:
    settings = {"levels": (1,), "level_s": 0.3, "limits": ANY, **plan}
    return CapacityTest(
        Target(server.url, "secret", "scripted"), CHAT, Plan(**settings), watcher, is_own=True
    )


test_of.__test__ = False  # type: ignore[attr-defined]


async def test_every_level_is_measured_with_what_the_server_holds(server: ScriptedServer) -> None:
    watcher = Watcher()
    levels = await test_of(server, watcher, levels=(1, 2)).run()
    assert [level.users for level in levels] == [1, 2]
    assert watcher.levels == levels
    for level in levels:
        assert (level.kv_share, level.slots, level.preemptions) == (0.4, 2, 0)
        assert level.queue_p95_s == 0.5
    assert server.patches == []


async def test_above_a_bad_level_nothing_is_measured_but_a_finer_one_below_it(
    server: ScriptedServer,
) -> None:
    watcher = Watcher()

    async def break_the_next(level: Level) -> None:
        watcher.levels.append(level)
        server.refuse = 2 if level.users == 1 else 0

    watcher.level_done = break_the_next  # type: ignore[method-assign]
    levels = await test_of(server, watcher, levels=(1, 4, 8)).run()
    assert [(level.users, level.errors, level.is_added) for level in levels] == [
        (1, 0, False),
        (4, 2, False),
        (2, 0, True),
    ]


async def test_slots_are_raised_for_a_level_and_given_back(server: ScriptedServer) -> None:
    watcher = Watcher()
    levels = await test_of(server, watcher, levels=(1, 3, 4)).run()
    assert server.patches == [{"slots": 3}, {"slots": 4}, {"slots": "auto"}]
    assert [level.slots for level in levels] == [2, 3, 4]
    assert watcher.held == [{"before": "auto", "set": 3}, {"before": "auto", "set": 4}, None]


async def test_slots_that_an_admin_changed_meanwhile_are_left(server: ScriptedServer) -> None:
    watcher = Watcher()
    server.hold()
    running = asyncio.ensure_future(test_of(server, watcher, levels=(3,), level_s=600.0).run())
    await server.until_active(1)
    server.release()
    async with asyncio.timeout(30):
        while not server.patches:
            await asyncio.sleep(0.01)
    server.state["slots"] = {"requested": 7, "effective": 7}
    watcher.stop = "alice stopped it."
    with pytest.raises(RunStopped, match="alice stopped it"):
        await running
    assert server.patches == [{"slots": 3}]
    assert watcher.held[-1] is None


async def test_stopping_closes_all_and_keeps_the_measured_levels(server: ScriptedServer) -> None:
    watcher = Watcher()

    async def stop_at_the_second(level: Level) -> None:
        watcher.levels.append(level)
        watcher.stop = "alice stopped it."

    watcher.level_done = stop_at_the_second  # type: ignore[method-assign]
    with pytest.raises(RunStopped):
        await test_of(server, watcher, levels=(1, 2), raises_slots=False).run()
    await server.until_active(0)
    assert [level.users for level in watcher.levels] == [1]


async def test_while_a_member_waits_nothing_is_sent(server: ScriptedServer) -> None:
    watcher = Watcher()
    server.state["requests"] = [{**MEMBER, "state": "waiting", "age_s": 0.1}]
    running = asyncio.ensure_future(test_of(server, watcher, level_s=600.0).run())
    async with asyncio.timeout(30):
        while len(watcher.told) < 20:
            await asyncio.sleep(0.01)
    # The warm-up may have been on its way.
    assert len(server.bodies) <= 1
    assert watcher.told[-1]["members_waiting"] == 1
    server.state["requests"] = [{**MEMBER, "state": "decode", "age_s": 0.4}]
    async with asyncio.timeout(30):
        while len(server.bodies) < 5:
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_member_who_waits_too_long_ends_the_test(server: ScriptedServer) -> None:
    server.state["requests"] = [{**MEMBER, "state": "waiting", "age_s": 5.1}]
    with pytest.raises(RunStopped, match="had to wait longer than 5 s"):
        await test_of(server, Watcher(), level_s=600.0).run()


async def test_the_tests_own_waiting_requests_and_no_guard_do_not_hold_it(
    server: ScriptedServer,
) -> None:
    own = {"labels": {"source": "capacity"}, "state": "waiting", "age_s": 60.0}
    server.state["requests"] = [own]
    assert len(await test_of(server, Watcher()).run()) == 1
    server.state["requests"] = [{**MEMBER, "state": "waiting", "age_s": 60.0}]
    assert len(await test_of(server, Watcher(), guard_s=None).run()) == 1


async def test_a_server_that_stops_ends_the_test(server: ScriptedServer) -> None:
    server.state["state"] = "draining"
    with pytest.raises(LoadFailed, match="The server was stopped"):
        await test_of(server, Watcher()).run()


async def test_d06_the_slots_of_a_dead_test_are_given_back(server: ScriptedServer) -> None:
    target, held = Target(server.url, "secret"), {"before": "auto", "set": 8}
    await give_slots_back(target, held)
    assert server.patches == []
    server.state["slots"] = {"requested": 8, "effective": 8}
    await give_slots_back(target, held)
    assert server.patches == [{"slots": "auto"}]
