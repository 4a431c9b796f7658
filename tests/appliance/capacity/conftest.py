from collections.abc import Iterator
from typing import Any

import pytest
from django.test import Client

from appliance.accounts.models import User
from appliance.serving.gateway import gateway_install, gateway_remove
from tests.appliance.fake_backend import FakeBackend


@pytest.fixture
def backend() -> Iterator[FakeBackend]:
    backend = FakeBackend()
    gateway_install(backend)
    yield backend
    gateway_remove()


@pytest.fixture
def admin(alice: User) -> Client:
    client = Client(headers={"host": "localhost"})
    client.force_login(alice)
    return client


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Runs handed to the task queue; no worker runs beside the tests."""
    from appliance.capacity.tasks import run_capacity

    found: list[int] = []

    def delay(run_id: int) -> Any:
        found.append(run_id)

    monkeypatch.setattr(run_capacity, "delay", delay)
    return found
