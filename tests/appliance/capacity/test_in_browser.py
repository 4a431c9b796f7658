"""The capacity page in a real browser, over the real server, worker and engine (tiny model)."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.appliance.serving.processes import Running, make_data_dir, run_python
from tests.appliance.serving.tiny_model import save_tiny_model
from tests.chromium import WAIT_MS, chromium, signed_in

pytestmark = pytest.mark.e2e

PASSWORD = "nine-Lanterns-burn"
MAKE_ADMIN = f"""
import django; django.setup()
from appliance.accounts.services import user_create
from appliance.serving.models import EngineSetting
user_create("alice", password={PASSWORD!r}, is_admin=True)
EngineSetting.objects.create(name="slots", value=1)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    data_dir: Any = make_data_dir(tmp_path / "data")
    made = run_python(data_dir, "-c", MAKE_ADMIN)
    assert made.returncode == 0, made.stderr
    running = Running(
        data_dir,
        ["manage.py", "serve", "--port", "{port}"],
        APPLIANCE_MODEL=str(save_tiny_model(tmp_path / "tiny")),
        OMP_NUM_THREADS="1",
    )
    yield running.until_ready()
    running.end()


@pytest.fixture
def page(server: Running) -> Iterator[Page]:
    complaints: list[str] = []
    expect.set_options(timeout=WAIT_MS)
    with chromium() as browser:
        page = browser.new_page(storage_state=signed_in(browser, server.url, "alice", PASSWORD))
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"{server.url}/console/capacity/")
        yield page
    assert complaints == []


def test_start_stop_start_again_and_apply(page: Page, server: Running) -> None:
    expect(page.locator("#never-title")).to_be_visible()
    page.fill("#id_levels", "1")
    page.select_option("#id_level_s", "180")
    expect(page.locator("#start")).to_have_text("Start test, about 7 min")
    page.click("#start")
    expect(page.locator("#run-head")).to_have_text("Running: 1 at the same time")
    expect(page.locator("#start")).to_be_disabled()
    page.click("#stop")
    expect(page.locator("#result-title")).to_have_text("The test was stopped")

    page.fill("#id_levels", "2")
    page.select_option("#id_level_s", "15")
    # Whatever the machine is doing beside this: the claim is about the page.
    page.fill("#id_ttft", "600")
    page.fill("#id_itl", "60000")
    page.click("#start")
    expect(page.locator("#run-head")).to_have_text("Running: 2 at the same time")
    expect(page.locator("#result-title")).to_have_text("Set slots to 2", timeout=2 * WAIT_MS)
    summary = page.locator("#chart svg[role=img]").get_attribute("aria-label") or ""
    assert "2 at the same time" in summary
    page.goto(f"{server.url}/console/tuning/")
    expect(page.locator("#advice-title")).to_have_text("Set slots to 2")
    page.click("[data-suggest]")
    expect(page.locator("[data-setting=slots] input.input")).to_have_value("2")
    expect(page.locator("#apply")).to_have_text("Apply 1 change")
    page.goto(f"{server.url}/console/capacity/")
    page.click("#apply")
    expect(page.locator(".toast")).to_contain_text("Slots set to 2.")
    effective = page.evaluate(
        "async () => (await (await fetch('/api/engine')).json()).slots.effective"
    )
    assert effective == 2
    page.goto(f"{server.url}/console/history/")
    applied = page.locator("tbody tr", has_text="Tuned").first
    expect(applied).to_contain_text(re.compile(r"Parallel slots .+ → 2 \(capacity test of "))
    page.goto(f"{server.url}/console/")
    events = page.locator("#events li")
    # Two tests; what they sent, and what was stopped at their ends, has no lines of its own.
    expect(events.filter(has_text="A capacity test of alice sends requests")).to_have_count(2)
    expect(events.filter(has_text="alice's")).to_have_count(0)
    page.goto(f"{server.url}/console/tuning/")
    expect(page.locator("#advice-title")).to_have_text("Keep 2 slots")
    expect(page.locator("[data-suggest]")).to_have_count(0)
