"""A pool of 100,000 blocks in a real browser: what it draws, what it costs, what it says."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page

from tests.appliance.console.paint_counter import count_paints, scroll
from tests.appliance.console.simulated_process import Server

pytestmark = pytest.mark.e2e

BLOCKS = 100_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--blocks", str(BLOCKS), "--slots", "32", "--arrivals", "1.6")
    server = Server(tmp_path_factory.mktemp("large-pool"), *options)
    yield server
    server.stop()


@pytest.fixture
def page(page: Page, server: Server) -> Page:
    count_paints(page)
    page.goto(f"{server.url}/console/")
    page.wait_for_selector("#block-summary[data-total]", state="attached")
    return page


def test_scrolling_paints_once_a_frame_and_only_what_is_seen(page: Page) -> None:
    page.click("#pause")
    seen = scroll(page, frames=60)
    assert seen["scroll"] > 3 * seen["height"], "the map is not long"
    cells_seen = (seen["height"] / 5 + 2) * (seen["width"] / 5)
    assert 0 < seen["paints"] <= 60 + 2
    assert seen["most"] <= cells_seen < BLOCKS / 4
    # Equal neighbours are one fill: far fewer than cells.
    assert seen["fills"] / seen["paints"] < cells_seen / 2


def test_updates_take_less_than_20_kb_a_second_and_come_four_times_at_most(
    page: Page, server: Server
) -> None:
    """Bytes over the server's own time, which each update tells, from the second one on."""
    told: list[tuple[int, dict[str, Any]]] = []

    def listen(socket: Any) -> None:
        socket.on("framereceived", lambda text: told.append((len(text), json.loads(text))))

    page.on("websocket", listen)
    page.reload()
    page.wait_for_selector("#block-summary[data-total]", state="attached")
    while len(told) < 40:
        page.wait_for_timeout(100)
    whole, *updates = told
    assert whole[1]["base"] == -1
    assert all(message["base"] >= 0 for _, message in updates)
    seconds = updates[-1][1]["now"] - whole[1]["now"]
    assert sum(size for size, _ in updates) / seconds < 20_000
    assert len(updates) / seconds < 4.2
    assert whole[0] < 250_000


def test_the_summary_for_those_who_see_no_canvas_is_what_the_api_says(
    page: Page, server: Server
) -> None:
    server.set_state("frozen")
    try:
        page.wait_for_function(
            """async () => {
              const kv = (await (await fetch('/api/engine')).json()).kv;
              const data = document.querySelector('#block-summary').dataset;
              return Number(data.total) === kv.blocks_total
                && Number(data.held) + Number(data.shared) === kv.blocks_used
                && Number(data.cached) === kv.blocks_cached
                && Number(data.free) === kv.blocks_free;
            }"""
        )
        page.focus("#block-map")
        page.keyboard.press("End")
        page.wait_for_function(
            "() => document.querySelector('#block-spoken').textContent.includes('Block 99999,')"
        )
    finally:
        server.set_state("ready")


def test_sorted_by_user_the_whole_pool_is_still_one_paint_a_frame(page: Page) -> None:
    page.get_by_role("radio", name="By user").check()
    seen = scroll(page, frames=30)
    # Updates paint as well, four a second at most; a sorted map has fewer, longer runs.
    assert 0 < seen["paints"] <= 30 + 2 + 4 * (sum(seen["times"]) / 1000 + 1)
    assert seen["most"] < 4000
