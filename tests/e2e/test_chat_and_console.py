"""The first evening with the product: chat, stop, come back, tune, look at the memory."""

import re

import httpx
from playwright.sync_api import BrowserContext, Page, expect

from tests.e2e.server import Server

LONG_QUESTION = "Write a long story about a fox who travels around the world, day by day."


def ask(page: Page, text: str) -> None:
    page.locator("#draft").fill(text)
    expect(page.locator("#send")).to_be_enabled()
    page.locator("#draft").press("Enter")


def last_answer(page: Page) -> str:
    return page.locator("article.turn[data-role=assistant] [data-text]").last.inner_text()


def wait_for_growth(page: Page, longer_than: int) -> int:
    """Wait until the last answer has more characters than this; its length then."""
    page.wait_for_function(
        """least => {
            const all = document.querySelectorAll('article.turn[data-role=assistant] [data-text]');
            return all.length && all[all.length - 1].textContent.trim().length > least;
        }""",
        arg=longer_than,
    )
    return len(last_answer(page))


def stop_while_it_grows(page: Page) -> None:
    """Press Stop, from within the page, as soon as three lengths of the last answer were seen: by
    the time a test hears of them a quick machine has written the whole answer."""
    page.wait_for_function(
        """() => {
            const all = document.querySelectorAll('article.turn[data-role=assistant] [data-text]');
            const length = all.length ? all[all.length - 1].textContent.trim().length : 0;
            window.lengthsSeen ??= new Set();
            if (length) window.lengthsSeen.add(length);
            if (window.lengthsSeen.size < 3) return false;
            document.querySelector('#composer #stop').click();
            return true;
        }"""
    )


def test_an_answer_grows_and_stop_frees_the_slot(server: Server, page: Page) -> None:
    page.goto(f"{server.url}/")
    ask(page, LONG_QUESTION)
    stop_while_it_grows(page)
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    page.wait_for_function(
        """async () => (await (await fetch('/api/engine')).json()).running === 0"""
    )
    kept = last_answer(page)
    assert kept
    page.reload()
    expect(page.locator("article.turn")).to_have_count(2)
    assert last_answer(page).split()[:5] == kept.split()[:5]


def test_several_conversations_are_kept(server: Server, page: Page) -> None:
    page.goto(f"{server.url}/")
    ask(page, "What is the capital of France?")
    wait_for_growth(page, 5)
    # Drawn at random, an answer may go on for long; what is kept does not depend on its end.
    page.locator("body").press("Escape")
    expect(page.locator("#composer #stop")).to_be_hidden()
    page.get_by_role("link", name="New chat").click()
    expect(page.locator("#conversations .conversation-link")).to_have_count(2)


def test_a_reload_goes_on_where_the_answer_is(server: Server, page: Page) -> None:
    page.goto(f"{server.url}/")
    ask(page, LONG_QUESTION)
    wait_for_growth(page, 10)
    page.wait_for_url(re.compile("/c/"))
    before = last_answer(page)
    page.reload()
    # Whether it still runs by now depends on the machine; nothing may be lost or come twice.
    page.wait_for_function(
        """before => {
            const all = document.querySelectorAll('article.turn[data-role=assistant] [data-text]');
            return all.length === 1 && all[0].innerText.startsWith(before);
        }""",
        arg=before,
    )
    page.locator("body").press("Escape")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    kept = last_answer(page)
    page.reload()
    assert last_answer(page) == kept


def test_slots_change_live_and_the_map_moves(
    server: Server, admin_context: BrowserContext, api_key: str
) -> None:
    assert admin_context.browser is not None
    # A window of its own: the console rests while its tab is hidden.
    window = admin_context.browser.new_context(storage_state=admin_context.storage_state())
    console = window.new_page()
    console.goto(f"{server.url}/console/")
    summary = console.locator("#block-summary")
    expect(summary).to_have_attribute("data-held", "0")
    total = int(summary.get_attribute("data-total") or 0)

    # An answer that runs until it is stopped.
    body = {
        "model": httpx.get(f"{server.url}/v1/models", headers=bearer(api_key), timeout=60).json()[
            "data"
        ][0]["id"],
        "messages": [{"role": "user", "content": LONG_QUESTION}],
        "stream": True,
        "ignore_eos": True,
    }
    with (
        httpx.Client(base_url=server.url, headers=bearer(api_key), timeout=60) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith("data:")
        expect(summary).not_to_have_attribute("data-held", "0")
        expect(console.locator("#block-legend")).to_contain_text("alice")

        console.locator("#slots-requested").fill("3")
        console.locator("#slots-apply").click()
        expect(console.locator("#slots-effective")).to_have_text("3")
        engine = console.evaluate("async () => (await fetch('/api/engine')).json()")
        assert engine["slots"]["requested"] == engine["slots"]["effective"] == 3
        assert engine["running"] == 1
        written = engine["requests"][0]["num_output_tokens"]
        console.wait_for_function(
            """async least => {
                const engine = await (await fetch('/api/engine')).json();
                return engine.requests[0].num_output_tokens > least;
            }""",
            arg=written + 20,
        )
    expect(summary).to_have_attribute("data-held", "0")
    counts = ("data-held", "data-shared", "data-cached", "data-free")
    parts = [int(summary.get_attribute(name) or 0) for name in counts]
    assert sum(parts) == total == engine["kv"]["blocks_total"]
    window.close()


def bearer(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"}


def test_an_admin_adds_a_member_who_can_chat(
    server: Server, page: Page, admin_context: BrowserContext
) -> None:
    page.goto(f"{server.url}/console/users/")
    page.get_by_label("User name").fill("bob")
    page.get_by_role("button", name=re.compile("Add")).first.click()
    link = re.search(r"http\S+/invite/\S+", page.locator("main").inner_text())
    assert link is not None, page.locator("main").inner_text()
    assert admin_context.browser is not None
    other = admin_context.browser.new_context()
    member = other.new_page()
    member.goto(link[0])
    member.locator("input[type=password]").first.fill("battery-staple-9")
    member.locator("form button[type=submit]").first.click()
    member.goto(f"{server.url}/")
    expect(member.locator("#draft")).to_be_visible()
    assert member.goto(f"{server.url}/console/").status == 403
    other.close()
