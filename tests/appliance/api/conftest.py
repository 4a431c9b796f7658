from collections.abc import AsyncIterator, Iterator

import pytest

from appliance.accounts.models import User
from appliance.accounts.services import user_create
from appliance.api_keys.services import api_key_issue
from appliance.serving.booking import bookings_wait
from appliance.serving.gateway import gateway_install, gateway_remove
from tests.appliance.api.asgi_caller import DEADLINE_S, Caller, answers_end
from tests.appliance.fake_backend import FakeBackend


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
