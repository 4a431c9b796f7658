from collections.abc import AsyncIterator, Iterator

import pytest

from appliance.accounts.models import User
from appliance.chat.generations import generations
from appliance.chat.models import MessageState
from appliance.serving.booking import bookings_wait
from appliance.serving.gateway import gateway_install, gateway_remove
from tests.appliance.base import make_alice, make_bob
from tests.appliance.chat.browser import Tabs
from tests.appliance.fake_backend import FakeBackend


@pytest.fixture
def backend() -> Iterator[FakeBackend]:
    backend = FakeBackend()
    gateway_install(backend)
    yield backend
    gateway_remove()


@pytest.fixture
def alice(transactional_db: None) -> User:
    """Committed, so that the threads of the database work see her."""
    return make_alice()


@pytest.fixture
def bob(transactional_db: None) -> User:
    return make_bob()


@pytest.fixture
async def tabs(transactional_db: None, backend: FakeBackend) -> AsyncIterator[Tabs]:
    """Opens sockets; at the end nothing of the test is left running."""
    tabs = Tabs()
    yield tabs
    backend.release()
    await tabs.close_all()
    if generations._guard is not None:
        generations._guard.cancel()
    await generations.end_all(MessageState.STOPPED)
    assert await bookings_wait(5) == 0
