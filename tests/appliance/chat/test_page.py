"""The page as the server draws it: escaped, grouped, honest about what is missing."""

import re
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

import pytest

from appliance.chat import services
from appliance.chat.models import Conversation, MessageState, Role
from tests.appliance.chat.browser import sign_in
from tests.appliance.limits import tokens_a_day

ROOT = Path(__file__).resolve().parents[3]
HOSTILE = "</title><img src=x onerror=alert(1)><script>alert(1)</script>"


@pytest.fixture
def page(bob, backend):
    client = sign_in(bob)
    return lambda path="/": client.get(path).content.decode()


def test_hostile_titles_and_messages_are_shown_as_text(bob, page):
    """C14: the title in the head, the list, the window; questions and answers in the log."""
    conversation = services.conversation_create(bob, HOSTILE)
    services.message_append(conversation, Role.USER, HOSTILE)
    answer = services.message_append(
        conversation, Role.ASSISTANT, HOSTILE, state=MessageState.ERROR
    )
    answer.error = '"><script>alert(2)</script>'
    answer.save()
    html = page(f"/c/{conversation.pk}/")
    assert "<img" not in html
    assert "<script>" not in html
    assert html.count("&lt;img src=x onerror=alert(1)&gt;") >= 4


def test_the_search_shows_what_was_searched_as_text(bob, page):
    html = page("/chat/list/?q=<script>alert(1)</script>")
    assert "<script>" not in html
    assert "Nothing found for “&lt;script&gt;" in html


def test_the_search_shows_where_it_found_the_words(bob, page):
    conversation = services.conversation_create(bob, "Accounts")
    services.message_append(conversation, Role.USER, "An older <b>INVOICE</b> of " + "x" * 500)
    asked = conversation.messages.get()
    services.message_append(conversation, Role.ASSISTANT, "The invoice again")
    services.conversation_create(bob, "Invoice in the title only")
    gone = services.conversation_create(bob, "Replaced")
    services.message_append(gone, Role.USER, "invoice")
    gone.messages.update(superseded=True)
    html = page("/chat/list/?q=invoice")
    assert "2 found" in html
    assert f'href="/c/{conversation.pk}/#m{asked.pk}"' in html
    assert "An older &lt;b&gt;<mark>INVOICE</mark>&lt;/b&gt; of xxx" in html
    assert html.count("<mark>") == 1
    assert "x" * 121 not in html


@pytest.mark.parametrize(
    ("text", "query", "shown"),
    [
        ("needle", "NEEDLE", "<mark>needle</mark>"),
        ("a" * 60 + " the needle here", "needle", "…the <mark>needle</mark> here"),
        ("100 % of <i>", "% of <", "100 <mark>% of &lt;</mark>i&gt;"),
        ("Größe Ä", "Ä", "Größe <mark>Ä</mark>"),
        ("😀😀 a_b 😀", "a_b", "😀😀 <mark>a_b</mark> 😀"),
        ("y" * 300 + "needle", "needle", "<mark>needle</mark>"),
    ],
)
def test_an_excerpt_marks_the_words_as_they_were_written(bob, page, text, query, shown):
    conversation = services.conversation_create(bob, "Title")
    services.message_append(conversation, Role.USER, text)
    assert shown in page(f"/chat/list/?q={quote(query)}")


def test_the_page_breaks_no_rule_of_its_policy(bob, backend):
    """C14: no inline script, style or handler, so the strict policy can stand."""
    client = sign_in(bob)
    conversation = services.conversation_create(bob, "Hello")
    services.message_append(conversation, Role.USER, "Hello")
    response = client.get(f"/c/{conversation.pk}/")
    policy = response.headers["Content-Security-Policy"]
    assert "unsafe-inline" not in policy
    assert "script-src 'self'" in policy
    assert "img-src 'self' data:" in policy
    html = response.content.decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)", html)
    assert not re.search(r"\sstyle=|\son[a-z]+=", html)
    assert "no-store" in response.headers["Cache-Control"]


def test_a_first_visit_says_what_to_do(page):
    html = page()
    assert "No chats yet" in html
    assert 'data-model-ready="true"' in html


def test_the_list_marks_the_open_chat(bob, page):
    conversation = services.conversation_create(bob, "Hello")
    other = services.conversation_create(bob, "Other")
    html = page(f"/c/{conversation.pk}/")
    rows = re.findall(r'<a class="conversation-link" href="([^"]+)"( aria-current="page")?', html)
    assert (f"/c/{conversation.pk}/", ' aria-current="page"') in rows
    assert (f"/c/{other.pk}/", "") in rows


def test_a_chat_that_is_not_there_is_said_so(page, bob):
    html = page("/c/00000000-0000-4000-8000-000000000000/")
    assert "There is no such chat" in html


def test_without_a_model_the_page_still_shows_the_chats(bob, backend, page):
    backend.down = True
    conversation = services.conversation_create(bob, "Hello")
    services.message_append(conversation, Role.USER, "Still readable")
    html = page(f"/c/{conversation.pk}/")
    assert "Still readable" in html
    assert 'data-model-ready="false"' in html


def test_the_state_tells_model_and_quota(bob, backend):
    tokens_a_day(bob, 1000)
    state = sign_in(bob).get("/chat/state/").json()
    assert (state["model"], state["context_tokens"]) == ("scripted", 1000)
    assert state["quota"]["left_tokens"] == 1000
    backend.down = True
    assert sign_in(bob).get("/chat/state/").json()["model"] is None


def test_only_admins_are_shown_the_console(alice, bob, backend):
    assert 'href="/console/"' in sign_in(alice).get("/").content.decode()
    assert 'href="/console/"' not in sign_in(bob).get("/").content.decode()


def test_actions_need_the_csrf_token(bob, backend):
    conversation = services.conversation_create(bob, "Hello")
    client = sign_in(bob)
    client.handler.enforce_csrf_checks = True
    assert client.post(f"/c/{conversation.pk}/delete/").status_code == 403
    assert client.get(f"/c/{conversation.pk}/delete/").status_code == 405
    assert Conversation.objects.get().deleted_at is None


def test_actions_change_the_chat_and_answer_with_it(bob, backend):
    conversation = services.conversation_create(bob, "Hello")
    client = sign_in(bob)
    path = f"/c/{conversation.pk}"
    assert client.post(f"{path}/rename/", {"title": "Better"}).json() == {
        "conversation": {"id": str(conversation.pk), "title": "Better", "pinned": False}
    }
    assert client.post(f"{path}/pin/", {"pinned": "true"}).json()["conversation"]["pinned"] is True
    refused = client.post(f"{path}/rename/", {"title": " "})
    assert refused.status_code == 400
    assert refused.json()["code"] == "invalid_request"
    client.post(f"{path}/delete/")
    assert client.get(f"{path}/").status_code == 404
    client.post(f"{path}/restore/")
    assert client.get(f"{path}/").status_code == 200


# ---- what the browser runs


def test_vendored_files_are_the_ones_the_notice_names():
    folder = ROOT / "static" / "vendor"
    notice = (folder / "NOTICE").read_text()
    scripts = sorted(path.name for path in folder.glob("*.js"))
    assert scripts
    for name in scripts:
        assert name in notice, f"{name} has no entry in NOTICE"
    for name in ("marked-18.2.1.esm.js", "dompurify-3.5.0.esm.js"):
        assert sha256((folder / name).read_bytes()).hexdigest() in notice


def test_own_scripts_never_write_html_into_the_page():
    own = list((ROOT / "static" / "js").glob("*.js"))
    assert own
    for path in own:
        text = path.read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text, f"{path.name} uses {word}"


def test_the_chat_page_loads_scripts_that_exist(page):
    names = set(re.findall(r'src="/static/(js/[^"]+)"', page()))
    seen = set()
    while names - seen:
        name = (names - seen).pop()
        seen.add(name)
        text = (ROOT / "static" / name).read_text()
        if not name.startswith("vendor/"):
            for other in re.findall(r"from '(\.[^']+)'", text):
                names.add(str(Path(name).parent / other).replace("js/../", ""))
    assert "js/markdown.js" in seen


def test_every_message_and_close_code_is_in_the_readme():
    text = (ROOT / "appliance" / "chat" / "README.md").read_text()
    source = (ROOT / "appliance" / "chat" / "protocol.py").read_text()
    types = re.findall(r'type: Literal\["([a-z.]+)"\]', source)
    assert len(types) > 15
    for name in types:
        assert f"`{name}`" in text, f"{name} is not documented"
    for code in re.findall(r"CLOSE_\w+ = (\d+)", source):
        assert code in text, f"close code {code} is not documented"
