"""The live page in a real browser, over a busy simulated engine."""

import re

import pytest
from playwright.sync_api import Page, expect

from tests.appliance.console.simulated_process import Server

pytestmark = pytest.mark.e2e


@pytest.fixture
def page(page: Page, server: Server) -> Page:
    page.goto(f"{server.url}/console/")
    page.wait_for_selector("#block-summary[data-total]", state="attached")
    return page


def summary(page: Page) -> dict[str, int]:
    data = page.locator("#block-summary").evaluate("(element) => ({...element.dataset})")
    return {name: int(value) for name, value in data.items()}


def test_the_map_adds_up_and_moves(page: Page) -> None:
    first = summary(page)
    assert first["total"] == 4096
    parts = ("held", "shared", "cached", "free")
    assert sum(first[part] for part in parts) == first["total"]
    legend = page.locator("#block-legend [data-blocks]").all_inner_texts()
    assert sum(int(text.replace(",", "")) for text in legend) == first["total"]
    page.wait_for_function(
        "(step) => Number(document.querySelector('#block-summary').dataset.step) > step",
        arg=first["step"],
    )


def test_the_page_and_the_api_tell_the_same_once_nothing_moves(page: Page, server: Server) -> None:
    server.set_state("frozen")
    try:
        page.wait_for_function(
            """async () => {
              const kv = (await (await fetch('/api/engine')).json()).kv;
              const data = document.querySelector('#block-summary').dataset;
              return Number(data.held) + Number(data.shared) === kv.blocks_used
                && Number(data.cached) === kv.blocks_cached
                && Number(data.free) === kv.blocks_free
                && Number(data.shared) === kv.blocks_shared;
            }"""
        )
    finally:
        server.set_state("ready")


def test_changing_the_slots_holds_at_once_and_can_be_undone(page: Page) -> None:
    before = page.locator("#slots-effective").inner_text()
    page.fill("#slots-requested", "7")
    expect(page.locator("#slots-apply")).to_have_text(f"Apply {before} → 7")
    page.click("#slots-apply")
    expect(page.locator("#slots-effective")).to_have_text("7")
    expect(page.locator("#events li").first).to_contain_text(f"{before} → 7")
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#slots-effective")).to_have_text(before)
    expect(page.locator("#slots-requested")).to_have_value(before)


def test_a_bad_number_of_slots_is_told_beside_the_field(page: Page) -> None:
    for value, words in (("many", "no number"), ("5000", "4096")):
        page.fill("#slots-requested", value)
        page.click("#slots-apply")
        expect(page.locator("#slots-error")).to_contain_text(words)
        expect(page.locator("#slots-requested")).to_have_attribute("aria-invalid", "true")
    page.click("#slots-discard")
    expect(page.locator("#slots-error")).to_be_hidden()


def test_an_edit_that_another_admin_was_faster_with_is_refused(page: Page) -> None:
    page.fill("#slots-requested", "9")
    page.evaluate(
        """() => fetch('/api/engine', {method: 'PATCH', body: '{"slots": 11}', headers: {
          'Content-Type': 'application/json',
          'X-CSRFToken': document.querySelector('[name=csrfmiddlewaretoken]').value}})"""
    )
    expect(page.locator("#slots-effective")).to_have_text("11")
    expect(page.locator("#slots-requested")).to_have_value("9")
    page.click("#slots-apply")
    expect(page.locator("#slots-error")).to_contain_text("Somebody changed the settings")
    expect(page.locator("#slots-requested")).to_have_value("11")


def test_a_request_is_killed_after_asking(page: Page) -> None:
    row = page.locator("#requests tr:not(.is-ended)").last
    row.locator("[data-do=kill]").click()
    dialog = page.locator("#kill-dialog")
    expect(dialog).to_contain_text("An admin stopped this answer.")
    # The safe button has the focus.
    expect(dialog.get_by_role("button", name="Keep it running")).to_be_focused()
    dialog.get_by_role("button", name="Kill request").click()
    expect(page.locator(".toast").last).to_contain_text("was killed")
    expect(page.locator("#events")).to_contain_text("alice killed")


def test_the_map_is_read_by_keyboard(page: Page) -> None:
    page.focus("#block-map")
    page.keyboard.press("End")
    expect(page.locator("#block-spoken")).to_contain_text("Block 4095,")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#block-spoken")).to_contain_text("Block 1,")
    expect(page.locator("#block-card")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#block-card")).to_be_hidden()


def test_a_requests_block_table_is_all_its_blocks(page: Page, server: Server) -> None:
    """A row of the table for each run; together they are what the engine says that it holds."""
    server.set_state("frozen")
    try:
        row = page.locator("#requests tr:not(.is-ended)", has_text="writes").first
        row.locator(".row-link").click()
        table = page.locator("#block-table")
        expect(table).to_be_visible()
        page.wait_for_function(
            """async (id) => {
              const told = (await (await fetch('/api/engine')).json()).requests;
              const held = told.find((r) => r.request_id === id)?.num_blocks;
              const cells = document.querySelectorAll('#block-table tbody td:nth-child(3)');
              const shown = [...cells].reduce((sum, td) => sum + Number(td.textContent), 0);
              return shown === held && shown > 0;
            }""",
            arg=row.locator(".row-link").get_attribute("title"),
        )
        expect(table.locator("tbody td").first).to_contain_text(re.compile(r"^0–\d"))
    finally:
        server.set_state("ready")
    table.get_by_role("button", name="Show all").click()
    expect(table).to_be_hidden()


def test_head_room_is_drawn_as_free_blocks_that_are_kept(page: Page, server: Server) -> None:
    change = """(share) => fetch('/api/engine', {method: 'PATCH', headers: {
      'Content-Type': 'application/json',
      'X-CSRFToken': document.querySelector('[name=csrfmiddlewaretoken]').value},
      body: JSON.stringify({admission_headroom: share})})"""
    page.evaluate(change, 0.9)
    page.wait_for_function(
        "() => Number(document.querySelector('#block-summary').dataset.kept) > 0"
    )
    assert summary(page)["kept"] <= summary(page)["total"] * 0.9
    expect(page.locator('#block-legend [data-key="kept"]')).to_be_visible()
    page.evaluate(change, 0.0)
    expect(page.locator('#block-legend [data-key="kept"]')).to_be_hidden()


def test_a_waiting_request_says_why_it_waits(page: Page) -> None:
    before = page.locator("#slots-effective").inner_text()
    page.fill("#slots-requested", "1")
    page.click("#slots-apply")
    waiting = page.locator("#requests tr", has_text="waits, no. 1").first
    expect(waiting).to_contain_text("the only slot is taken")
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#slots-effective")).to_have_text(before)


def test_the_map_is_coloured_by_request_with_the_marks_in_the_table(page: Page) -> None:
    marked = page.locator("#requests td:nth-child(3) .user-mark")
    expect(marked).to_have_count(0)
    page.get_by_role("radio", name="Requests").check()
    expect(marked.first).to_be_visible()
    expect(page.locator("#requests td:nth-child(2) .user-mark")).to_have_count(0)
    page.get_by_role("radio", name="Users").check()
    expect(marked).to_have_count(0)


def test_one_user_alone_and_back(page: Page) -> None:
    user = page.locator("#block-legend [data-user]").first
    user.click()
    expect(user).to_have_attribute("aria-pressed", "true")
    user.click()
    expect(user).to_have_attribute("aria-pressed", "false")


def test_pause_stops_the_numbers_and_going_on_catches_up(page: Page) -> None:
    page.click("#pause")
    expect(page.locator("#pause")).to_have_attribute("aria-pressed", "true")
    # Updates that were on their way may still arrive; then the step stands still.
    page.wait_for_function(
        """() => {
          const step = document.querySelector('#block-summary').dataset.step;
          if (window.lastStep !== step) { window.lastStep = step; window.since = Date.now(); }
          return Date.now() - window.since > 1000;
        }""",
        polling=50,
    )
    step = summary(page)["step"]
    page.click("#pause")
    page.wait_for_function(
        "(step) => Number(document.querySelector('#block-summary').dataset.step) > step", arg=step
    )


def test_the_static_view_counts_what_it_draws(page: Page) -> None:
    page.get_by_label("What static batching would have done").check()
    share = page.locator('[data-busy="static"]')
    expect(share).to_be_visible()
    assert 0 < int(share.inner_text().removesuffix(" %")) <= 100


def test_a_reload_keeps_plots_slots_and_events(page: Page) -> None:
    page.wait_for_function(
        "() => /p50/.test(document.querySelector('[data-now=ttft]').textContent)"
    )
    page.reload()
    page.wait_for_selector("#block-summary[data-total]", state="attached")
    expect(page.locator("#events li").first).to_be_visible()
    expect(page.locator('[data-now="decode"]')).to_contain_text("tok/s")
    assert page.locator(".u-wrap canvas").count() == page.locator("[data-plot]").count() == 10


def test_a_longer_time_is_asked_of_the_server_and_drawn(page: Page) -> None:
    for name, words in (
        ("1 h", "1 h"),
        ("24 h", "24 h"),
        ("7 days", "7 days"),
        ("15 min", "15 min"),
    ):
        page.get_by_label(name, exact=True).check()
        plot = page.locator('[data-plot="decode"]')
        expect(plot).to_have_attribute("aria-label", re.compile(f"last {words}; now .* tok/s"))
    # CPU and memory of the machine stand beside the engine's numbers.
    expect(page.locator('[data-now="load"]')).to_contain_text("CPU")
    expect(page.locator('[data-now="memory"]')).to_contain_text("GiB")


@pytest.mark.parametrize(
    ("state", "words"),
    [("loading", "58 %"), ("draining", "is stopping"), ("dead", "ran out of memory")],
)
def test_the_banner_says_the_state(page: Page, server: Server, state: str, words: str) -> None:
    server.set_state(state)
    try:
        expect(page.locator("#live-banner")).to_contain_text(words)
    finally:
        server.set_state("ready")
    expect(page.locator("#live-banner")).to_be_hidden()


def test_while_the_model_loads_nothing_is_made_up(page: Page, server: Server) -> None:
    server.set_state("loading")
    try:
        expect(page.locator("#live-banner")).to_contain_text("58 %")
        expect(page.locator("#map-compare")).to_have_text(
            "The map appears as soon as a model serves."
        )
        expect(page.locator("#slots-badge")).to_be_hidden()
        expect(page.locator("#slots-requested")).to_be_disabled()
        for name in ("slots", "kv-why"):
            expect(page.locator(f'[data-vital="{name}"]')).to_be_empty()
    finally:
        server.set_state("ready")
    expect(page.locator("#slots-requested")).to_be_enabled()
    page.wait_for_function("() => document.querySelector('#block-summary').dataset.total > 0")


def test_nothing_overflows_at_1000_pixels(page: Page) -> None:
    page.set_viewport_size({"width": 1000, "height": 900})
    page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")


def test_tuning_fits_into_1000_pixels_with_large_numbers(page: Page, server: Server) -> None:
    page.set_viewport_size({"width": 1000, "height": 900})
    open_tuning(page, server)
    page.fill("#set-slots", "4096")
    expect(page.locator('[data-cell="slots-after"]')).to_have_text("4,096")
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    panel = page.locator(".side-panel")
    assert panel.evaluate("(panel) => panel.scrollWidth <= panel.clientWidth")


# ---- tuning


def open_tuning(page: Page, server: Server) -> None:
    page.goto(f"{server.url}/console/tuning/")
    expect(page.locator('[data-cell="slots-now"]')).to_have_text(re.compile(r"\d+"))


def test_settings_are_applied_together_and_stand_in_the_history(page: Page, server: Server) -> None:
    open_tuning(page, server)
    page.fill("#set-max_num_batched_tokens", "1024")
    page.locator("#set-enable_prefix_cache").uncheck()
    expect(page.locator("#pending")).to_contain_text("2 changes not applied")
    expect(page.locator("#apply")).to_have_text("Apply 2 changes")
    page.get_by_label("Why").fill("to see what the cache does")
    page.click("#apply")
    expect(page.locator(".toast")).to_contain_text("2 changes applied")
    newest = page.locator("tbody tr:has([data-back])").first
    expect(newest).to_contain_text("Prefix cache on → off")
    expect(newest).to_contain_text("to see what the cache does")
    newest.get_by_role("button", name="Go back").click()
    expect(page.locator("#set-enable_prefix_cache")).to_be_checked()
    expect(page.locator("#set-max_num_batched_tokens")).to_have_value("2048")


def test_kinds_of_requests_get_weights_and_go_back_to_their_order(
    page: Page, server: Server
) -> None:
    open_tuning(page, server)
    row = page.locator("[data-setting=class_weights]")
    chat = row.get_by_label("Weight of chat")
    expect(chat).to_be_hidden()
    row.get_by_role("combobox").select_option("by weight")
    chat.fill("4")
    expect(row.locator("[data-change]")).to_have_text("in order → chat 4, scripts 1, background 1")
    row.get_by_label("Weight of background").fill("0")
    expect(row.locator("[data-why]")).to_contain_text("“0” does not work here: 0.01 to 100")
    expect(page.locator("#apply")).to_be_disabled()
    row.get_by_label("Weight of background").fill("0.5")
    page.click("#apply")
    expect(row.locator("[data-now]")).to_have_text("chat 4, scripts 1, background 0.5")
    newest = page.locator("tbody tr:has([data-back])").first
    expect(newest).to_contain_text("in order → chat 4, scripts 1, background 0.5")
    page.reload()
    expect(chat).to_have_value("4")
    newest.get_by_role("button", name="Go back").click()
    expect(row.locator("[data-now]")).to_have_text("in order")
    expect(chat).to_be_hidden()


def test_the_preview_replays_real_requests(page: Page, server: Server) -> None:
    open_tuning(page, server)
    page.fill("#set-slots", "1")
    expect(page.locator('[data-cell="slots-after"]')).to_have_text("1")
    expect(page.locator('[data-cell="requests"]')).to_contain_text("replayed")
    after = page.locator('[data-cell="waited-after"]')
    expect(after).to_have_text(re.compile(r"[1-9]"))
    page.click("#discard")
    expect(page.locator("#pending")).to_be_hidden()


def test_the_preview_counts_memory_in_blocks_and_bytes_and_names_whom_it_touches(
    page: Page, server: Server
) -> None:
    """2 MiB a block of 16 tokens: three slots of 8,192 tokens are 1,536 blocks, 3 GiB of 8."""
    open_tuning(page, server)
    page.fill("#set-slots", "3")
    page.fill("#set-max_model_len", "8192")
    expect(page.locator('[data-cell="blocks-after"]')).to_have_text("1,536 3 GiB")
    expect(page.locator('[data-cell="share-after"]')).to_have_text("38 %")
    expect(page.locator('[data-cell="whole-after"]')).to_have_text("8")
    expect(page.locator('[data-bar="after"]')).to_contain_text("3 GiB of 8 GiB")
    page.fill("#set-kv_memory_share", "0.2")
    expect(page.locator('[data-cell="pool-now"]')).to_have_text("4,096 8 GiB")
    expect(page.locator('[data-cell="pool-after"]')).to_have_text("2,048 4 GiB")
    expect(page.locator('[data-cell="share-after"]')).to_have_text("75 %")
    expect(page.locator('[data-bar="after"]')).to_contain_text("3 GiB of 4 GiB")
    page.fill("#set-slots", "1")
    expect(page.locator("#touches")).to_contain_text("they go on to their end")
    page.click("#discard")
    expect(page.locator("#touches")).to_be_empty()


def test_what_only_a_start_can_change_says_how(page: Page, server: Server) -> None:
    open_tuning(page, server)
    boot = page.locator("section", has=page.locator("#boot-title"))
    expect(boot).to_contain_text("128.0 KiB")
    for name in ("APPLIANCE_DTYPE", "APPLIANCE_KV_DTYPE", "APPLIANCE_DEVICE"):
        expect(boot).to_contain_text(name)


def test_a_value_that_does_not_work_is_told_beside_its_field(page: Page, server: Server) -> None:
    open_tuning(page, server)
    page.fill("#set-aging_s", "soon")
    expect(page.locator("#why-aging_s")).to_contain_text("0.1 to 86,400")
    expect(page.locator("#apply")).to_be_disabled()


def test_a_change_of_another_admin_is_not_overwritten_unseen(page: Page, server: Server) -> None:
    open_tuning(page, server)
    page.fill("#set-max_waiting_requests", "500")
    page.evaluate(
        """() => fetch('/api/engine', {method: 'PATCH', body: '{"aging_s": 33.0}', headers: {
          'Content-Type': 'application/json',
          'X-CSRFToken': document.querySelector('[name=csrfmiddlewaretoken]').value}})"""
    )
    page.click("#apply")
    expect(page.locator("#conflict")).to_be_visible()
    expect(page.locator("#set-aging_s")).to_have_value("33")
    expect(page.locator("#set-max_waiting_requests")).to_have_value("500")
    page.click("#apply")
    expect(page.locator(".toast")).to_contain_text("1 change applied")
