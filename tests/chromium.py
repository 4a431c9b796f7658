"""The browser of the tests: how it is started, and how a person signs in. Imports no Django."""

from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, StorageState, sync_playwright

CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
# Far more than it takes: the machine may be busy with other things.
WAIT_MS = 60_000


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


def signed_in(browser: Browser, url: str, name: str, password: str) -> StorageState:
    """What a context needs to be signed in. Ask once a server: the log-in limits tries a minute."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(f"{url}/login/")
    page.fill('[name="login"]', name)
    page.fill('[name="password"]', password)
    page.click('button[type="submit"]')
    page.wait_for_url(f"{url}/")
    state = context.storage_state()
    context.close()
    return state
