"""What the live page says beside its pictures: what is wrong, and what the cache saved."""

import pytest
from playwright.sync_api import Page, expect

from tests.appliance.console.simulated_process import Server

pytestmark = pytest.mark.e2e


@pytest.fixture
def page(page: Page, server: Server) -> Page:
    page.goto(f"{server.url}/console/")
    page.wait_for_selector("#block-summary[data-total]", state="attached")
    return page


def test_a_line_over_the_page_says_why_the_model_is_slow_until_it_is_not(
    page: Page, server: Server
) -> None:
    server.set_state("notice The compiled CPU step is not in use: no compiler was found.")
    try:
        expect(page.locator("#live-banner")).to_contain_text("no compiler was found")
        expect(page.locator("#live-banner")).to_contain_text("Slower than it could be")
    finally:
        server.set_state("")
    expect(page.locator("#live-banner")).to_be_hidden()


def test_whose_prompts_begin_alike_and_what_that_saved(page: Page, server: Server) -> None:
    server.set_state("frozen")
    try:
        told = page.evaluate("async () => (await (await fetch('/api/engine')).json()).prefixes")
        rows = page.locator("#prefixes tr")
        expect(rows).to_have_count(len(told))
        most = max(told, key=lambda each: each["num_tokens_saved"])
        expect(rows.first).to_contain_text(f"{most['num_tokens_saved']:,}")
        expect(rows.filter(has_text="everybody: the team’s instructions")).to_have_count(1)
        expect(rows.filter(has=page.locator(".user-mark"))).to_have_count(len(told) - 1)
        expect(rows.filter(has_text="someone")).to_have_count(0)
    finally:
        server.set_state("ready")
