from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from appliance.accounts.models import User
from appliance.console.feed import ConsoleFeed, current_feed
from appliance.serving.gateway import gateway_install, gateway_remove
from tests.appliance.base import make_alice, make_bob
from tests.appliance.console.simulated_backend import SimulatedBackend


@pytest.fixture(autouse=True)
def _host_of_the_test_client(settings: Any) -> None:
    """Django's asynchronous test client always calls itself testserver."""
    settings.ALLOWED_HOSTS = ["localhost", "testserver"]


@pytest.fixture
def alice(transactional_db: None) -> User:
    """Committed, so that the threads of the database work see her."""
    return make_alice()


@pytest.fixture
def bob(transactional_db: None) -> User:
    return make_bob()


@pytest.fixture
def engine(alice: User, bob: User) -> Iterator[SimulatedBackend]:
    """A busy engine of 512 blocks; its time stands still unless a test moves it."""
    owners = [(str(alice.pk), "alice"), (str(bob.pk), "bob")]
    engine = SimulatedBackend(owners, total=512, slots=4, prompt=(100, 1200), arrivals_per_s=1.0)
    engine.advance(20)
    gateway_install(engine)
    yield engine
    gateway_remove()


@pytest.fixture
async def feed(engine: SimulatedBackend) -> AsyncIterator[ConsoleFeed]:
    """The feed of this test's event loop, quick so that no test waits for a quarter second."""
    feed = current_feed()
    feed.live_interval_s = feed.history_interval_s = 0.01
    yield feed
    await feed.close()
