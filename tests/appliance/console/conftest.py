from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from django.test import Client
from playwright.sync_api import Browser, Page, StorageState, expect

from appliance.accounts.models import User
from appliance.console.feed import ConsoleFeed, current_feed
from appliance.serving.gateway import gateway_install, gateway_remove
from tests.appliance.base import make_alice, make_bob
from tests.appliance.console.page import sign_in
from tests.appliance.console.simulated_backend import SimulatedBackend
from tests.appliance.console.simulated_process import Server
from tests.appliance.console.simulated_server import PASSWORD
from tests.chromium import WAIT_MS, chromium, signed_in


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
def admin(alice: User) -> Client:
    """A browser of alice's, without scripts."""
    return sign_in(alice)


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


# ---- the product in a real browser, over a busy simulated engine

expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("console-data"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def session(server: Server, browser: Browser) -> StorageState:
    return signed_in(browser, server.url, "alice", PASSWORD)


@pytest.fixture
def page(browser: Browser, session: StorageState) -> Iterator[Page]:
    """Signed in as alice; fails when the page broke the content policy or a script failed."""
    context = browser.new_context(storage_state=session, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "console",
        lambda message: (
            complaints.append(message.text) if "Content Security Policy" in message.text else None
        ),
    )
    yield page
    context.close()
    assert complaints == []
