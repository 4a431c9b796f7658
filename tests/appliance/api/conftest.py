from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.accounts.models import User
from appliance.accounts.services import user_create
from appliance.api_keys.services import api_key_issue
from appliance.serving.booking import bookings_wait
from appliance.serving.gateway import gateway_install, gateway_remove
from tests.appliance.api.asgi_caller import DEADLINE_S, Caller, answers_end
from tests.appliance.fake_backend import FakeBackend
from tests.appliance.serving.processes import Running, make_data_dir

CODE = """
import sys, django; django.setup()
from appliance.accounts.services import user_create
from appliance.api_keys.services import api_key_issue
print(api_key_issue(user_create("bob"), "tests")[1], flush=True)
from tests.appliance.api.api_server import main; main(sys.argv[1])
"""


@pytest.fixture
def bob(committed_db: None) -> User:
    """Committed, so that the threads of the database work see him."""
    return user_create("bob")


@pytest.fixture
async def backend(committed_db: None) -> AsyncIterator[FakeBackend]:
    backend = FakeBackend()
    gateway_install(backend)
    yield backend
    await answers_end()
    gateway_remove()
    # Else it would write into the next test's database.
    assert await bookings_wait(DEADLINE_S) == 0


@pytest.fixture
def caller(bob: User, backend: FakeBackend) -> Iterator[Caller]:
    return Caller(api_key_issue(bob, "tests")[1])


@pytest.fixture
def stranger(backend: FakeBackend) -> Caller:
    return Caller(None)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The real server on a port of its own, around the scripted back end."""
    running = Running(make_data_dir(tmp_path_factory.mktemp("clients")), ["-c", CODE, "{port}"])
    try:
        key = running.line()
        running.until_ready()
        yield SimpleNamespace(url=running.url, key=key)
    finally:
        running.end()
