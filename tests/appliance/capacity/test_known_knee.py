"""The whole test against a simulated engine whose knee is known, on simulated time."""

import heapq
from collections.abc import Sequence
from typing import Any

import pytest

from appliance.capacity import runner
from appliance.capacity.figures import Level
from appliance.capacity.load import Answer, Load, Target
from appliance.capacity.mix import CHAT
from appliance.capacity.plan import Plan
from appliance.capacity.recommend import Limits, advise
from appliance.capacity.runner import CapacityTest

PREFILL_S, GAP_S, TOKENS = 0.1, 0.02, 40
LIMITS = Limits(ttft_p95_s=0.3, itl_p95_s=0.05)


class SimulatedEngine:
    """`slots` answers at full speed, whatever else waits: the closed loop's knee is at `slots`."""

    def __init__(self, slots: int) -> None:
        self.slots = slots

    async def run_level(self, *given: Any, level_s: float, **_: Any) -> float:
        load: Load = next(each for each in given if isinstance(each, Load))
        free = [0.0] * self.slots
        arrivals = [(0.0, user) for user in range(load.users)]
        while arrivals[0][0] < level_s:
            sent_s, user = heapq.heappop(arrivals)
            begin_s = max(sent_s, heapq.heappop(free))
            first_s = begin_s + PREFILL_S
            stamps = [first_s + GAP_S * number for number in range(TOKENS)]
            heapq.heappush(free, stamps[-1])
            heapq.heappush(arrivals, (stamps[-1], user))
            load.answers.append(Answer(len(load.answers), sent_s, stamps, 100, TOKENS))
        return level_s


class Quiet:
    async def progress(self, told: dict[str, Any]) -> None: ...
    async def level_done(self, level: Level) -> None: ...
    async def slots_held(self, held: dict[str, Any] | None) -> None: ...
    async def queue_times(self, since: float, number: int) -> Sequence[float]:
        return []


@pytest.mark.parametrize(("slots", "fails_at"), [(1, 2), (2, 3), (3, 4), (4, 6), (6, 8), (8, 12)])
async def test_the_advice_is_the_knee_and_says_why_the_next_fails(
    monkeypatch: pytest.MonkeyPatch, slots: int, fails_at: int
) -> None:
    async def warmed_up(*_: Any) -> float:
        return 1.0

    monkeypatch.setattr(runner, "run_level", SimulatedEngine(slots).run_level)
    monkeypatch.setattr(runner, "warm_up", warmed_up)
    plan = Plan(levels=(1, 2, 4, 8, 16), level_s=60.0, limits=LIMITS)
    levels = await CapacityTest(Target("http://nowhere/v1"), CHAT, plan, Quiet()).run()
    advice = advise(levels, LIMITS, slots_now=64)
    assert (advice.users, advice.knee, advice.fails_at) == (slots, slots, fails_at)
    assert advice.title == f"Set slots to {slots}"
    [reason] = advice.reasons
    assert reason.startswith("the first token takes ")
    assert reason.endswith("(limit 0.30 s)")
    assert advice.text.endswith(" You run 64 now.")
    best = next(level for level in levels if level.users == slots)
    expected = slots * TOKENS / (PREFILL_S + GAP_S * (TOKENS - 1))
    assert best.tokens_per_s == pytest.approx(expected, rel=0.02)
