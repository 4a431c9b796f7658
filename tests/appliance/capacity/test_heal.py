"""D06: what a test that died in the middle leaves behind is put right by the beat's task."""

import asyncio
from typing import Any

import pytest
from asgiref.sync import sync_to_async

from appliance.accounts.models import User
from appliance.api_keys.models import ApiKey
from appliance.capacity import tasks
from appliance.capacity.models import CapacityRun
from appliance.capacity.plan import Plan
from tests.appliance.base import make_alice
from tests.appliance.capacity.scripted_openai import scripted_server

HELD = {"before": "auto", "set": 8}


@pytest.fixture
def dead_run(transactional_db: None) -> CapacityRun:
    alice: User = make_alice()
    return CapacityRun.objects.create(
        started_by=alice,
        started_by_name="alice",
        plan=Plan().as_dict(),
        status=CapacityRun.Status.FAILED,
        is_open=False,
        slots=HELD,
    )


async def test_d06_slots_of_a_dead_test_go_back_and_the_key_for_it_is_gone(
    dead_run: CapacityRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted_server() as server:
        server.state = {"state": "ready", "slots": {"requested": 8, "effective": 8}}
        monkeypatch.setattr(tasks, "own_server", lambda: (server.url, 1))
        await sync_to_async(tasks.heal_capacity, thread_sensitive=False)()
        assert server.patches == [{"slots": "auto"}]
    await dead_run.arefresh_from_db()
    assert dead_run.slots is None
    keys: list[Any] = [key async for key in ApiKey.objects.all()]
    assert [key.is_live for key in keys] == [False]


async def test_without_a_server_they_wait_for_one(dead_run: CapacityRun) -> None:
    await asyncio.to_thread(tasks.heal_capacity)
    await dead_run.arefresh_from_db()
    assert dead_run.slots == HELD
    assert not await ApiKey.objects.aexists()
