"""Every page by ear, by keyboard, in both themes."""

import pytest
from playwright.sync_api import Page, expect

from tests.appliance.console.simulated_process import Server
from tests.page_checks import faults, unreachable

pytestmark = pytest.mark.e2e

PATHS = (
    "/", "/account/", "/account/try/", "/account/password/", "/console/", "/console/tuning/",
    "/console/capacity/", "/console/models/", "/console/exposure/", "/console/users/",
    "/console/groups/", "/console/service-accounts/", "/console/keys/", "/console/quotas/",
    "/console/usage/", "/console/history/", "/console/instructions/", "/console/nothing-here/",
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_everything_has_a_name_and_can_be_read_and_reached_by_tab(
    page: Page, server: Server, path: str
) -> None:
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
        page.goto(server.url + path)
        if path == "/console/":
            expect(page.locator("#requests tr").first).to_be_visible()
            # Rows that come and go would move under the focus.
            page.get_by_role("button", name="Pause").click()
        assert not faults(page)
    assert not unreachable(page)


def test_the_checks_find_what_they_are_for(page: Page, server: Server) -> None:
    page.goto(f"{server.url}/console/history/")
    page.evaluate(
        """() => document.querySelector('main').insertAdjacentHTML('afterbegin',
        '<h4>Too deep</h4><button></button><label for="gone">Name</label>'
        + '<p class="faint">Hard to read</p><button class="bare" aria-label="No ring"></button>')"""
    )
    page.evaluate(
        """() => {
        document.querySelector('.faint').style.color = '#ccc';
        document.querySelector('.bare').style.outline = 'none';
        }"""
    )
    found = " ".join(faults(page))
    for fault in ("h4 after h0", "no name: <button>", "names gone", "contrast 1."):
        assert fault in found
    assert any("bare" in one for one in unreachable(page))
