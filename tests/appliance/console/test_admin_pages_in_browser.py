"""Exposure, keys and quotas in a real browser, over a real socket: what is measured is real."""

import re

import pytest
from playwright.sync_api import Page, expect

from tests.appliance.console.simulated_process import Server

pytestmark = pytest.mark.e2e

PAGES = ("models", "instructions", "exposure", "users", "keys", "quotas", "usage", "history")


@pytest.mark.parametrize("name", PAGES)
def test_every_page_fits_into_1000_pixels_and_the_bar_on_one_line(
    page: Page, server: Server, name: str
) -> None:
    page.set_viewport_size({"width": 1000, "height": 800})
    page.goto(f"{server.url}/console/{name}/")
    expect(page.locator("nav [aria-current=page]")).to_have_text(name.title())
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    tops = page.locator("header.topbar nav a").evaluate_all("(all) => all.map((a) => a.offsetTop)")
    assert len(set(tops)) == 1
    end = page.locator("header.topbar .end").bounding_box()
    nav = page.locator("header.topbar nav").bounding_box()
    assert end
    assert nav
    assert nav["x"] + nav["width"] <= end["x"]


@pytest.mark.parametrize("width", [390, 820])
def test_no_page_for_admins_scrolls_sideways_on_a_small_screen(
    page: Page, server: Server, width: int
) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    paths = [f"/console/{name}/" for name in (*PAGES, "tuning", "capacity", "groups")]
    for path in ("/console/", "/account/", "/console/service-accounts/", *paths):
        page.goto(server.url + path)
        too_wide = page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
        assert too_wide <= 0, path
        current = page.locator("header.topbar nav [aria-current=page]")
        if path != "/account/":
            expect(current).to_be_in_viewport(ratio=1)


def test_on_a_phone_each_row_says_all_of_it_without_scrolling_sideways(
    page: Page, server: Server
) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"{server.url}/console/users/")
    row = page.locator(".table.folds tbody tr", has_text="bob")
    for place in row.locator("td").all() + row.locator("button").all():
        box = place.bounding_box()
        assert box is None or (box["x"] >= 0 and box["x"] + box["width"] <= 390)
    expect(row.get_by_role("button", name="Switch off")).to_be_visible()


def test_the_reach_that_is_shown_was_measured(page: Page, server: Server) -> None:
    page.goto(f"{server.url}/console/exposure/")
    for part in ("Chat", "API", "Console", "Metrics"):
        cell = page.get_by_role("row", name=part).locator("td").first
        expect(cell).to_contain_text(re.compile(r"answered in [\d,]+ ms"))
    port = server.url.rpartition(":")[2]
    sockets = page.locator("section", has_text="Where it listens now").last
    expect(sockets.get_by_role("row", name=re.compile(f"127.0.0.1 {port}"))).to_contain_text(
        "this machine only"
    )


def test_a_change_on_trial_counts_down_and_is_kept(page: Page, server: Server) -> None:
    page.goto(f"{server.url}/console/exposure/")
    page.get_by_label("Proxies").fill("10.20.4.1")
    page.get_by_role("button", name="Save callers").click()
    bar = page.locator(".confirm-bar")
    expect(bar).to_contain_text("Proxies none → 10.20.4.1")
    first = page.locator("[data-seconds]").inner_text()
    expect(page.locator("[data-seconds]")).not_to_have_text(first)
    expect(page.get_by_role("button", name="Save callers")).to_be_disabled()
    bar.get_by_role("button", name="Keep change").click()
    expect(bar).to_be_hidden()
    row = page.locator("tbody tr", has_text="Proxies none → 10.20.4.1").first
    row.get_by_role("button", name="Go back").click()
    # Going back may shut somebody out as well.
    expect(bar).to_contain_text("Proxies 10.20.4.1 → none")
    bar.get_by_role("button", name="Take back now").click()
    expect(page.get_by_label("Proxies")).to_have_value("10.20.4.1")


def test_a_key_is_revoked_after_asking(page: Page, server: Server) -> None:
    page.goto(f"{server.url}/account/")
    page.get_by_label("Name for a new key").fill("nightly report")
    page.get_by_role("button", name="Make key").click()
    expect(page.locator("#new-key")).to_be_visible()
    page.goto(f"{server.url}/console/keys/")
    revoke = page.get_by_role("button", name="Revoke nightly report of alice")
    revoke.click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("button", name="Keep it")).to_be_focused()
    dialog.get_by_role("button", name="Keep it").click()
    expect(revoke).to_be_visible()
    revoke.click()
    dialog.get_by_role("button", name="Revoke key").click()
    expect(page.get_by_role("status")).to_contain_text("revoked")
    expect(revoke).to_have_count(0)


def test_a_rule_is_added_changed_and_deleted_by_keyboard(page: Page, server: Server) -> None:
    page.goto(f"{server.url}/console/quotas/")
    form = page.get_by_role("form", name="New rule")
    form.get_by_label("For", exact=True).select_option(label="bob")
    form.get_by_label("Limit", exact=True).select_option("requests_per_minute")
    form.get_by_label("At most").fill("1.5k")
    form.get_by_label("At most").press("Enter")
    expect(page.get_by_role("status")).to_contain_text("Rule for bob: 1,500 requests a minute")
    page.get_by_role("link", name="Change: 1,500 requests a minute for bob").click()
    form = page.get_by_role("form", name="Change a rule")
    expect(form.get_by_label("At most")).to_have_value("1,500")
    form.get_by_label("At most").fill("much")
    form.get_by_label("At most").press("Enter")
    expect(page.get_by_label("At most")).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_text("no whole number")).to_be_visible()
    page.get_by_role("button", name="Delete: 1,500 requests a minute for bob").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("button", name="Keep it")).to_be_focused()
    dialog.get_by_role("button", name="Delete rule").click()
    expect(page.get_by_role("status")).to_contain_text("Rule for bob deleted")


def test_a_group_gets_its_members(page: Page, server: Server) -> None:
    page.goto(f"{server.url}/console/users/")
    page.get_by_role("link", name="Groups").click()
    page.get_by_label("Name of a new group").fill("night shift")
    page.get_by_role("button", name="Make group").click()
    page.get_by_role("button", name="Members of night shift").click()
    page.get_by_role("dialog").get_by_label("bob").check()
    page.get_by_role("button", name="Save members").click()
    expect(page.get_by_role("row", name="night shift")).to_contain_text("bob")
    page.get_by_role("link", name="New rule for night shift").click()
    expect(page.get_by_label("For", exact=True)).to_have_value(re.compile("group:"))
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def test_a_name_that_is_not_its_own_is_refused_on_a_page_with_its_style(
    page: Page, server: Server
) -> None:
    """The page's one style is allowed by its hash; the `page` fixture fails on a broken policy."""
    page.goto(server.url.replace("127.0.0.1", "other.localhost"))
    expect(page.locator("h1")).to_have_text("Refused")
    expect(page.locator("main")).to_contain_text("ask an admin to add this one under Names")
    expect(page.locator("main")).to_have_css("max-width", "380px")
