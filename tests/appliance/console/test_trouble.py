"""What is wrong with the server stands over every page for admins, with what to do."""

import asyncio
import logging
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.conf import settings
from django.test import Client
from django.utils import timezone

from appliance.accounts.models import User
from appliance.brief_log import OnceAMinute
from appliance.console import trouble
from appliance.console.trouble import TroubleWatch, trouble_forget
from appliance.serving import worker_watch
from appliance.serving.health import LEAST_FREE_BYTES, Readiness
from appliance.serving.models import WorkerSign
from appliance.serving.tasks import sign_of_life

READY = {"state": "ready", "running": 1, "model": {"name": "m", "notice": ""}}


@pytest.fixture(autouse=True)
def _nothing_wrong_before(monkeypatch: pytest.MonkeyPatch) -> Any:
    trouble_forget()
    monkeypatch.setattr(worker_watch, "_expected_since_s", None)
    yield
    trouble_forget()


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let readiness say this."""

    def says(name: str) -> None:
        async def readiness() -> Readiness:
            return Readiness(name)

        monkeypatch.setattr(trouble, "readiness", readiness)

    says("ready")
    return says


async def keys(state: dict[str, Any], events: tuple[dict[str, Any], ...] = ()) -> list[str]:
    watch = TroubleWatch()
    await watch.look()
    found = [one.key for one in watch.take(state, events)]
    await watch.close()
    return found


@pytest.mark.parametrize("name", ["disk", "database", "redis", "stalled"])
async def test_what_readiness_finds_is_told_with_what_to_do(
    name: str, status: Any, alice: User
) -> None:
    status(name)
    assert await keys(READY) == [name]
    assert len(trouble._OUTSIDE[name].why) > 60


@pytest.mark.parametrize(
    ("state", "key"),
    [("dead", "dead"), ("hung", "hung"), ("draining", "draining"), ("unavailable", "absent")],
)
async def test_the_engine_goes_before_everything_else(
    state: str, key: str, status: Any, alice: User
) -> None:
    status("disk")
    found = await keys({"state": state, "running": 2, "model": {"notice": "No compiler."}})
    assert found == [key, "disk", "slow"]


async def test_a_disk_with_little_left_is_told_before_it_is_full(
    status: Any, alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trouble, "free_bytes", lambda: 5 * LEAST_FREE_BYTES)
    assert await keys(READY) == ["low_disk"]


async def test_an_engine_that_failed_and_serves_again_is_told_and_then_forgotten(
    status: Any, alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(trouble.time, "monotonic", lambda: now_s)
    watch = TroubleWatch()
    failed = {"kind": "engine_failed", "at": 1.0, "data": {"cause": "no memory left."}}
    assert watch.take({"state": "rebuilding"}, [failed]) == ()
    [told] = watch.take(READY, [])
    assert told.key == "mended"
    assert "It failed: no memory left. Answers" in told.why
    now_s += trouble.MENDED_SHOWN_S + 1
    assert watch.take(READY, []) == ()
    await watch.close()


async def test_kernels_that_fell_back_are_told(status: Any, alice: User) -> None:
    model = {"name": "m", "notice": "The compiled CPU step is not in use: no compiler."}
    assert await keys({**READY, "model": model}) == ["slow"]


async def test_a_worker_that_signs_is_not_missed_and_one_that_stopped_is(
    status: Any, alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await keys(READY) == [], "nobody expects one before the server serves"
    worker_watch.worker_expect()
    assert await keys(READY) == [], "it may take a while to its first sign"
    monkeypatch.setattr(worker_watch, "FIRST_SIGN_S", 0.0)
    assert await keys(READY) == ["worker"]
    await sync_to_async(sign_of_life)()
    assert await keys(READY) == []
    long_ago = timezone.now() - worker_watch.MISSING_AFTER - timedelta(seconds=1)
    await WorkerSign.objects.aupdate(at=long_ago)
    assert await keys(READY) == ["worker"]


async def test_a_look_that_fails_is_logged_and_tells_what_the_last_one_told(
    status: Any, alice: User, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    status("disk")
    watch = TroubleWatch()
    await watch.look()

    def gone() -> int:
        raise FileNotFoundError("the data folder")

    status("ready")
    monkeypatch.setattr(trouble, "free_bytes", gone)
    monkeypatch.setattr(trouble, "_log", OnceAMinute(trouble.logger, logging.ERROR))
    watch.take(READY, [])
    assert watch._task is not None
    await asyncio.wait([watch._task])
    assert [one.key for one in watch.take(READY, [])] == ["disk"]
    assert "cannot look for trouble now" in caplog.text


def test_the_worker_is_told_to_sign_more_often_than_it_is_missed() -> None:
    entry = settings.CELERY_BEAT_SCHEDULE["sign-of-life"]
    assert entry["task"] == sign_of_life.name
    assert 3 * entry["schedule"] <= worker_watch.MISSING_AFTER.total_seconds()


async def test_pages_for_admins_show_the_worst_and_members_see_nothing(
    status: Any, alice: User, bob: User
) -> None:
    status("disk")
    await keys(READY)
    for user, path, is_told in (
        (alice, "/console/users/", True),
        (alice, "/console/models/", True),
        (alice, "/account/", False),
        (bob, "/account/", False),
    ):
        client = Client(headers={"host": "localhost"})
        await sync_to_async(client.force_login)(user)
        answer = await sync_to_async(client.get)(path)
        assert ('data-trouble="disk"' in answer.content.decode()) is is_told, path
