"""The chat page in a real browser with a scripted model: what only a browser can show."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, StorageState, expect

from tests.appliance.base import PASSWORD
from tests.chromium import WAIT_MS, chromium, signed_in
from tests.e2e.server import free_port

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.appliance.chat.fake_server",
            "--port",
            str(port),
            "--delay=0.01",
        ],
        cwd=ROOT,
        env={**os.environ, "APPLIANCE_DATA_DIR": str(tmp_path_factory.mktemp("look"))},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline().startswith("ready")
    yield f"http://127.0.0.1:{port}"
    server.terminate()
    server.wait(20)
    server.stdout.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def session(browser: Browser, address: str) -> StorageState:
    return signed_in(browser, address, "bob", PASSWORD)


class Watched:
    """A signed-in page, and all it asked of others or complained of."""

    def __init__(self, browser: Browser, address: str, session: StorageState) -> None:
        self.address = address
        self.context = browser.new_context(storage_state=session)
        self.faults: list[str] = []
        self.page = self.open("/")

    def open(self, path: str) -> Page:
        page = self.context.new_page()
        page.set_default_timeout(WAIT_MS)
        own = (self.address, self.address.replace("http", "ws"))
        page.on("console", lambda m: self.faults.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: self.faults.append(str(e)))
        page.on("dialog", lambda d: self.faults.append(d.message))
        page.on("request", lambda r: None if r.url.startswith(own) else self.faults.append(r.url))
        page.goto(self.address + path)
        return page


@pytest.fixture
def watched(browser: Browser, address: str, session: StorageState) -> Iterator[Watched]:
    watched = Watched(browser, address, session)
    yield watched
    watched.context.close()
    assert watched.faults == []


@pytest.fixture
def phone(watched: Watched, browser: Browser, session: StorageState) -> Page:
    watched.context.close()
    watched.context = browser.new_context(
        storage_state=session,
        viewport={"width": 390, "height": 844},
        has_touch=True,
        is_mobile=True,
    )
    return watched.open("/")


def ask(page: Page, text: str) -> None:
    page.fill("#draft", text)
    page.click("#send")


def is_idle(page: Page) -> None:
    expect(page.locator(".turn.is-last .speed")).to_contain_text("token", timeout=WAIT_MS)
    expect(page.locator("#stop")).to_be_hidden(timeout=WAIT_MS)


def test_hostile_text_runs_nothing_and_asks_nobody(watched):
    """C14, C16: while it streams, and again when the history is loaded."""
    page = watched.page
    ask(page, "hostile </title><script>document.title='owned'</script>")
    is_idle(page)
    for _ in range(2):
        log = page.locator("#turns")
        text = log.inner_text()
        assert "onerror=\"document.title='owned'\"" in text
        assert "one (javascript:alert(1))" in text
        assert (
            log.locator("img, script, iframe, form, style, video, math, details, base").count() == 0
        )
        links = log.locator(".prose a").evaluate_all("all => all.map(a => [a.href, a.rel])")
        assert links
        assert all(re.match(r"https://(example\.org|evil\.example)/", href) for href, _ in links)
        assert {rel for _, rel in links} == {"noopener noreferrer"}
        assert "owned" not in page.title().replace("document.title='owned'", "")
        page.reload()
        is_idle(page)


def test_a_reload_in_mid_answer_and_a_second_tab_end_with_the_stored_text(watched):
    """C05: neither loses nor doubles a word, and Stop works from either."""
    page = watched.page
    ask(page, "code slow")
    expect(page.locator(".prose.live")).to_contain_text("Here is", timeout=WAIT_MS)
    page.wait_for_url(re.compile("/c/"))
    other = watched.open(page.url.removeprefix(watched.address))
    page.reload()
    for tab in (page, other):
        expect(tab.locator(".prose.live")).to_contain_text("Here is", timeout=WAIT_MS)
    other.keyboard.press("Escape")
    for tab in (page, other):
        expect(tab.locator("[data-after]")).to_contain_text("You stopped", timeout=WAIT_MS)
    shown = [tab.locator(".prose").inner_text() for tab in (page, other)]
    assert shown[0] == shown[1]
    page.reload()
    is_idle(page)
    assert page.locator(".prose").inner_text() == shown[0]


def test_continue_goes_on_in_the_same_answer(watched):
    """By keyboard, over a reload, and in a second tab; the joined text is the model's."""
    page = watched.page
    ask(page, "cut slow")
    note = page.locator(".turn.is-last [data-after]")
    expect(note).to_contain_text("longest length", timeout=WAIT_MS)
    assert page.locator(".prose").inner_text() == "Paris is the capital of France."
    page.reload()
    other = watched.open(page.url.removeprefix(watched.address))
    button = page.get_by_role("button", name="Continue")
    button.focus()
    page.keyboard.press("Enter")
    # While it goes on nothing else can be asked, and the keys still work.
    expect(button).to_be_hidden(timeout=WAIT_MS)
    expect(page.locator("#draft")).to_be_focused(timeout=WAIT_MS)
    expect(other.locator(".prose.live")).to_contain_text("It stands", timeout=WAIT_MS)
    page.reload()
    for tab in (page, other):
        is_idle(tab)
        assert tab.locator(".turn").count() == 2
        shown = tab.locator(".prose").inner_text()
        assert shown == "Paris is the capital of France. It stands on the Seine."
        expect(tab.locator(".speed").last).to_contain_text("11 tokens")
        expect(tab.get_by_role("button", name="Continue")).to_have_count(0)


def test_a_stopped_answer_can_go_on_too(watched):
    page = watched.page
    ask(page, "code slow")
    expect(page.locator(".prose.live")).to_contain_text("Here is", timeout=WAIT_MS)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Continue").click(timeout=WAIT_MS)
    expect(page.locator(".code-block code")).to_contain_text("def read_amount", timeout=WAIT_MS)
    page.keyboard.press("Escape")
    expect(page.locator("[data-after]")).to_contain_text("You stopped", timeout=WAIT_MS)
    assert page.locator(".turn").count() == 2


def test_a_message_is_edited_in_its_place_and_what_came_after_is_replaced(watched):
    """By keyboard; in a second tab and after a reload the chat is the same."""
    page = watched.page
    for text in ("First words", "Second words"):
        ask(page, text)
        is_idle(page)
    page.wait_for_url(re.compile("/c/"))
    other = watched.open(page.url.removeprefix(watched.address))
    page.get_by_role("button", name="Edit this message").first.focus()
    page.keyboard.press("Enter")
    box = page.get_by_role("textbox", name="Your message")
    expect(box).to_be_focused()
    expect(page.locator(".edit-box .help")).to_have_text("The 3 messages after it are replaced.")
    # Esc leaves it as it was, and the keys where they were.
    box.fill("Thrown away")
    page.keyboard.press("Escape")
    expect(page.locator(".edit-box")).to_have_count(0)
    expect(page.get_by_role("button", name="Edit this message").first).to_be_focused()
    expect(page.locator(".bubble").first).to_have_text("First words")
    page.keyboard.press("Enter")
    box.fill("Better words")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("on two lines")
    page.keyboard.press("Enter")
    is_idle(page)
    page.wait_for_function("document.querySelectorAll('.turn').length === 2")
    expect(page.locator("#draft")).to_be_focused()
    page.reload()
    for tab in (page, other):
        expect(tab.locator(".turn")).to_have_count(2, timeout=WAIT_MS)
        expect(tab.locator(".bubble")).to_have_text("Better words\non two lines")
        expect(tab.locator(".prose")).to_contain_text("Paris", timeout=WAIT_MS)
    # The chat was named by its first message.
    expect(page.locator("#title")).to_have_text("Better words")


def test_an_edit_that_is_refused_stays_open_with_its_text(watched):
    page = watched.page
    ask(page, "Short")
    is_idle(page)
    # Arrow up in an empty message box.
    page.locator("#draft").press("ArrowUp")
    box = page.get_by_role("textbox", name="Your message")
    long = "word " * 1200
    box.fill(long)
    box.press("Enter")
    expect(page.locator("#notice")).to_contain_text("too long", timeout=WAIT_MS)
    expect(box).to_have_value(long)
    expect(box).to_be_focused()
    box.fill("hold it")
    box.press("Enter")
    # Nothing is edited while an answer is written.
    expect(page.locator(".prose.live")).to_contain_text("Paris", timeout=WAIT_MS)
    expect(page.locator('[data-act="edit"]')).to_be_hidden()
    expect(page.locator("#notice")).to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator("[data-after]")).to_contain_text("You stopped", timeout=WAIT_MS)
    expect(page.locator('[data-act="edit"]')).to_be_attached()
    assert page.locator(".bubble").all_inner_texts() == ["hold it"]


def test_on_a_phone_a_message_is_edited_with_the_finger(phone):
    page = phone
    ask(page, "Short")
    is_idle(page)
    page.get_by_role("button", name="Edit this message").tap()
    box = page.get_by_role("textbox", name="Your message")
    box.fill("One line")
    # On a screen keyboard Enter is a new line.
    page.keyboard.press("Enter")
    page.keyboard.type("and another")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.locator(".edit-box [type=submit]").tap()
    expect(page.locator(".bubble")).to_have_text("One line\nand another", timeout=WAIT_MS)
    is_idle(page)
    assert page.locator(".turn").count() == 2


def test_a_full_chat_says_to_start_a_new_one(watched):
    """A11: the server refuses more, and the note offers what is left to do."""
    page = watched.page
    ask(page, "cut " + "word " * 992)
    page.get_by_role("button", name="Continue").click(timeout=WAIT_MS)
    note = page.locator(".turn.is-last [data-after]")
    expect(note).to_contain_text("This chat is full", timeout=WAIT_MS)
    expect(note.get_by_role("button", name="Continue")).to_have_count(0)
    note.get_by_role("link", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0, timeout=WAIT_MS)


def test_a_message_that_is_refused_comes_back_to_the_box(watched):
    """A11: too long is said, nothing is cut, the text is not lost."""
    page = watched.page
    ask(page, "word " * 1200)
    expect(page.locator("#notice")).to_contain_text("too long", timeout=WAIT_MS)
    assert page.input_value("#draft") == "word " * 1200
    assert page.locator(".turn").count() == 0
    page.reload()
    assert page.input_value("#draft") == "word " * 1200
    page.click("#send")
    expect(page.locator("#notice")).to_contain_text("too long", timeout=WAIT_MS)
    # What is said of a message goes with it.
    page.fill("#draft", "")
    expect(page.locator("#notice")).to_be_empty()


def test_a_deleted_chat_comes_back_with_undo(watched):
    page = watched.page
    ask(page, "Keep this")
    is_idle(page)
    page.click("#more")
    page.click("#menu [data-act=delete]")
    expect(page.locator(".turn")).to_have_count(0, timeout=WAIT_MS)
    page.click(".toast [data-act=undo]")
    expect(page.locator(".turn").first).to_contain_text("Keep this", timeout=WAIT_MS)


def test_a_chat_is_saved_as_a_file_from_its_menu(watched):
    page = watched.page
    ask(page, "Keep <b>this</b>")
    is_idle(page)
    for opener in ("#more", ".row [data-menu-for]"):
        page.locator(opener).first.focus()
        page.keyboard.press("Enter")
        for _ in range(2):
            page.keyboard.press("ArrowDown")
        with page.expect_download() as saving:
            page.keyboard.press("Enter")
        assert saving.value.suggested_filename == "Keep b this b.md"
        text = Path(saving.value.path()).read_text()
        assert "Keep <b>this</b>\n\n---\n\n**Answer**\n\nParis is" in text
        expect(page.locator("#menu")).to_be_hidden()
    # The page is where it was.
    assert page.locator(".turn").count() == 2


def test_a_new_name_can_be_taken_back(watched):
    page = watched.page
    ask(page, "First name")
    is_idle(page)
    page.click("#more")
    page.click("#menu [data-act=rename]")
    page.keyboard.type("Second name")
    page.keyboard.press("Enter")
    named = page.locator(".row", has=page.locator("[aria-current]")).locator("[data-title]")
    expect(named).to_have_text("Second name", timeout=WAIT_MS)
    page.click(".toast [data-act=undo]")
    expect(named).to_have_text("First name", timeout=WAIT_MS)
    expect(page.locator("#title")).to_have_text("First name")


def test_what_a_search_found_is_brought_into_sight(watched):
    page = watched.page
    ask(page, "long with a needle inside")
    is_idle(page)
    expect(page.locator(".bubble")).not_to_be_in_viewport()
    # From another chat, and from this one.
    for path in (page.url, watched.address):
        page.goto(path)
        page.fill("#search", "needle ins")
        page.locator(".row mark", has_text="needle ins").click()
        expect(page.locator(".is-found .bubble")).to_be_in_viewport(timeout=WAIT_MS)
    expect(page).to_have_url(re.compile(r"/c/[0-9a-f-]+/$"))


def test_on_a_phone_the_list_makes_room_for_what_was_found(phone):
    ask(phone, "A pin in a haystack")
    is_idle(phone)
    phone.click("#sidebar-open")
    phone.fill("#search", "pin in")
    phone.locator(".row mark", has_text="pin in").tap()
    expect(phone.locator(".is-found .bubble")).to_be_in_viewport(timeout=WAIT_MS)
    expect(phone.locator("#sidebar")).not_to_be_in_viewport()
    phone.fill("#draft", "The keys work again")


def test_keys_work_all_over_the_page_and_single_ones_can_be_switched_off(watched):
    page = watched.page
    ask(page, "One")
    is_idle(page)
    page.locator("#log").focus()
    page.keyboard.press("/")
    expect(page.locator("#search")).to_be_focused()
    # In a text box they are text.
    page.keyboard.press("?")
    expect(page.locator("#search")).to_have_value("?")
    page.fill("#search", "")
    page.locator("#log").focus()
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keys")
    expect(dialog).to_be_visible()
    dialog.get_by_role("checkbox").uncheck()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    page.locator("#log").focus()
    page.keyboard.press("/")
    page.keyboard.press("?")
    expect(page.locator("#log")).to_be_focused()
    expect(dialog).to_be_hidden()
    page.get_by_role("button", name="all keys").click()
    expect(dialog.get_by_role("checkbox")).not_to_be_checked()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+Shift+O")
    expect(page.locator(".turn")).to_have_count(0, timeout=WAIT_MS)


def test_markdown_becomes_tables_lists_and_coloured_code(watched):
    page = watched.page
    ask(page, "table")
    is_idle(page)
    assert page.locator(".prose table td.r").all_inner_texts() == ["9", "5"]
    assert page.locator(".prose ol > li > ul > li").count() == 2
    page.goto(watched.address)
    ask(page, "code")
    is_idle(page)
    assert page.locator(".code-block [data-lang]").inner_text() == "python"
    assert "def" in page.locator(".code-block .k").all_inner_texts()
    code = page.locator(".code-block code").inner_text()
    assert code.startswith("from decimal import Decimal\n\ndef read_amount")
