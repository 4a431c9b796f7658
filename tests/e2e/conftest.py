"""One real server and one real browser for all end-to-end tests, in the order they stand."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.chromium import chromium
from tests.e2e.server import Server

ADMIN, PASSWORD = "alice", "correct-horse-7"

# The machine that runs this may be slow; nothing below waits for a fixed time.
expect.set_options(timeout=60_000)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/e2e/" in item.nodeid:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def server(bundled_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("data"), bundled_model_dir).start()
    yield running
    assert running.stop() == 0, "\n".join(running.lines)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def admin_context(server: Server, browser: Browser) -> Iterator[BrowserContext]:
    """Signed in as the first admin, who came by the one-time link of the first start."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(60_000)
    page = context.new_page()
    link = server.wait_for_line(r"set-up: (http\S+)")[1]
    page.goto(link)
    page.get_by_label("User name").fill(ADMIN)
    page.get_by_label("Password", exact=False).first.fill(PASSWORD)
    page.get_by_role("button", name="Make admin account").click()
    page.wait_for_url(re.compile(rf"^{server.url}/(login/)?$"))
    if page.url.endswith("/login/"):
        sign_in(page, ADMIN, PASSWORD)
    page.close()
    yield context
    context.close()


def sign_in(page: Page, username: str, password: str) -> None:
    page.get_by_label("User name").fill(username)
    page.get_by_label("Password", exact=False).first.fill(password)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_label("Message", exact=True).last).to_be_visible()


@pytest.fixture
def page(admin_context: BrowserContext) -> Iterator[Page]:
    """A fresh tab; what the page logs as an error fails the test."""
    page = admin_context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    yield page
    page.close()
    assert not problems, problems


@pytest.fixture(scope="session")
def api_key(server: Server, admin_context: BrowserContext) -> str:
    """A key with every scope, made the way a script makes one."""
    arguments = ("create_api_key", ADMIN, "--name", "tests", "--scopes", "chat,models,admin")
    return server.manage(*arguments).strip()
