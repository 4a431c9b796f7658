"""The page to try calls, in a real browser over the real server."""

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.appliance.serving.processes import Running, make_data_dir

pytestmark = pytest.mark.e2e

CHROMIUM = "/usr/bin/chromium"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
WAIT_MS = 60_000
PASSWORD = "nine-Lanterns-burn"
CODE = f"""
import sys, django; django.setup()
from appliance.accounts.services import user_create
from appliance.api_keys.services import api_key_issue
print(api_key_issue(user_create("bob", password={PASSWORD!r}), "tests")[1], flush=True)
from tests.appliance.api.api_server import main; main(sys.argv[1])
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    server = Running(make_data_dir(tmp_path_factory.mktemp("try")), ["-c", CODE, "{port}"])
    try:
        server.key = server.line()
        yield server.until_ready()
    finally:
        server.end()


@pytest.fixture
def page(running: Any) -> Iterator[Page]:
    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page()
        page.set_default_timeout(WAIT_MS)
        expect.set_options(timeout=WAIT_MS)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda m: complaints.append(m.text) if "Policy" in m.text else None)
        page.goto(f"{running.url}/login/?next=/account/")
        page.fill('[name="login"]', "bob")
        page.fill('[name="password"]', PASSWORD)
        page.click('button[type="submit"]')
        page.wait_for_url(f"{running.url}/account/")
        page.get_by_role("link", name="Try the API").click()
        yield page
        browser.close()
    assert complaints == []


def test_a_call_is_sent_with_the_key_and_its_answer_arrives(page: Page, running: Any) -> None:
    answer, status = page.locator("#answer"), page.locator("#status")
    page.get_by_label("API key").fill("bh_wrong")
    page.get_by_role("button", name="Send").click()
    expect(status).to_contain_text("401 refused")
    expect(answer).to_contain_text("invalid_api_key")

    page.get_by_label("API key").fill(running.key)
    page.get_by_role("button", name="Send").click()
    expect(status).to_contain_text("200 OK")
    expect(answer).to_contain_text("data: [DONE]")

    page.get_by_label("Body").fill('{"model": "scripted",')
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert")).to_contain_text("no JSON")

    page.get_by_label("Address").select_option("/v1/models")
    expect(page.get_by_label("Body")).to_be_hidden()
    page.get_by_role("button", name="Send").click()
    expect(answer).to_contain_text('"id":"scripted"')


def test_c14_what_a_model_says_stays_text(page: Page, running: Any) -> None:
    page.get_by_label("API key").fill(running.key)
    page.get_by_label("Address").select_option("/v1/completions")
    page.get_by_label("Body").fill('{"model": "scripted", "prompt": "<img src=x>", "echo": true}')
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#answer")).to_contain_text("<img src=x>")
    assert page.locator("#answer *").count() == 0


def test_the_document_is_there_for_who_is_signed_in(page: Page, running: Any) -> None:
    found = page.request.get(f"{running.url}/account/openapi.json")
    assert found.json()["paths"]["/v1/responses"]
    link = page.get_by_role("link", name="OpenAPI document")
    expect(link).to_have_attribute("href", "/account/openapi.json")
