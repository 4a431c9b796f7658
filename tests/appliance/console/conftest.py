import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from appliance.accounts.models import User
from appliance.console.feed import ConsoleFeed, current_feed
from appliance.serving.gateway import gateway_install, gateway_remove
from tests.appliance.base import make_alice, make_bob
from tests.appliance.console.simulated_backend import SimulatedBackend
from tests.appliance.console.simulated_server import PASSWORD


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


# ---- the product in a real browser, over a busy simulated engine

ROOT = Path(__file__).resolve().parents[3]
# Far more than it takes: the machine may be busy with other things.
WAIT_MS = 30_000
CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip

expect.set_options(timeout=WAIT_MS)


class Server:
    def __init__(self, data_dir: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.appliance.console.simulated_server", str(port)],
            cwd=ROOT,
            env={**os.environ, "APPLIANCE_DATA_DIR": str(data_dir), "DATABASE_URL": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert json.loads(self.process.stdout.readline())["listening"] == port

    def set_state(self, state: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{state}\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=30)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("console-data"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def session(server: Server, browser: Browser) -> Any:
    """Signed in once: the log-in limits tries a minute."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{server.url}/login/")
    page.fill('[name="login"]', "alice")
    page.fill('[name="password"]', PASSWORD)
    page.click('button[type="submit"]')
    page.wait_for_url(f"{server.url}/")
    state = context.storage_state()
    context.close()
    return state


@pytest.fixture
def page(browser: Browser, session: Any) -> Iterator[Page]:
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
