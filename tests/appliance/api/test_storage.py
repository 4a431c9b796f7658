"""A database that is away or full (D12) refuses with 503, once in the log, and recovers."""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import InterfaceError, OperationalError

from appliance.api import auth, reply, sse
from appliance.brief_log import OnceAMinute
from appliance.quotas.models import UsageRecord
from appliance.serving import booking, services
from tests.appliance.api.asgi_caller import DEADLINE_S, Caller
from tests.appliance.api.checks import CHAT, GOOD, check_error
from tests.appliance.fake_backend import FakeBackend

BODIES: dict[str, dict[str, Any]] = {
    CHAT: GOOD,
    "/v1/completions": {"model": "scripted", "prompt": "Hello"},
    "/v1/responses": {"model": "scripted", "input": "Hello"},
}
FULL = OperationalError("database or disk is full")


@pytest.fixture(autouse=True)
def fresh_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(booking, "_trouble", OnceAMinute(booking.logger, logging.ERROR))


@pytest.fixture
def full_disk() -> Iterator[pytest.MonkeyPatch]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise FULL

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "quota_reserve", refuse)
        yield patch


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_d12_a_request_on_a_full_disk_is_503_and_runs_nothing(
    caller: Caller,
    backend: FakeBackend,
    full_disk: pytest.MonkeyPatch,
    path: str,
    stream: bool,
) -> None:
    answer = await caller.post(path, {**BODIES[path], "stream": stream})
    error = await check_error(answer, 503, "storage_unavailable")
    assert answer.headers["retry-after"] == "5"
    assert "disk" not in error["message"]
    assert backend.running == {}
    full_disk.undo()
    assert (await caller.post(path, BODIES[path])).status == 200


async def test_d12_a_full_disk_does_not_fill_the_log(
    caller: Caller, full_disk: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(20):
        await check_error(await caller.chat(), 503, "storage_unavailable")
    [line] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert str(FULL) in line.getMessage()
    assert line.exc_info is None


@pytest.mark.parametrize("fault", [FULL, InterfaceError("connection already closed")])
async def test_d12_a_key_that_cannot_be_looked_up_is_no_wrong_key(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    def gone(*args: Any, **kwargs: Any) -> None:
        raise fault

    monkeypatch.setattr(auth, "api_key_authenticate", gone)
    await check_error(await caller.get("/v1/models"), 503, "storage_unavailable")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_running_answer_outlives_a_database_that_is_away_for_a_while(
    caller: Caller, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    asked: list[int] = []

    def gone(key_id: int) -> bool:
        asked.append(key_id)
        raise OperationalError("server closed the connection")

    monkeypatch.setattr(reply, "KEY_CHECK_S", 0.0)
    monkeypatch.setattr(sse, "KEY_CHECK_S", 0.0)
    monkeypatch.setattr(reply, "api_key_is_live", gone)
    answer = await caller.chat(stream=stream)
    if stream:
        assert (await asyncio.wait_for(answer.events(), DEADLINE_S))[-1] == "[DONE]"
    assert asked
    assert answer.status == 200
    assert await UsageRecord.objects.acount() == 1
