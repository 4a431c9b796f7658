"""A conversation saved as a file: whole, and harmless whatever it is called and says."""

import uuid
from email.message import Message as Headers

import pytest
from django.test import Client

from appliance.chat import services
from appliance.chat.export import FILE_NAME_CHARS, file_name
from appliance.chat.models import Conversation, Message, MessageState, Role
from tests.appliance.chat.browser import sign_in


@pytest.fixture
def client(bob, backend) -> Client:
    return sign_in(bob)


def saved(client, conversation):
    return client.get(f"/c/{conversation.pk}/export/")


def name_in(response):
    """The file's name as a browser reads it."""
    headers = Headers()
    headers["Content-Disposition"] = response.headers["Content-Disposition"]
    assert headers.get_content_disposition() == "attachment"
    return headers.get_filename()


def test_the_file_has_every_message_as_it_was_written(client, bob):
    chat = services.conversation_create(bob, "Import *script*")
    services.message_append(chat, Role.USER, "Why?\n  Two lines <b>")
    old = services.message_append(chat, Role.ASSISTANT, "Replaced")
    Message.objects.filter(pk=old.pk).update(superseded=True)
    services.message_append(chat, Role.ASSISTANT, "| a | b |\n| - | - |\n")
    response = saved(client, chat)
    assert response.headers["Content-Type"] == "text/markdown; charset=utf-8"
    assert name_in(response) == "Import script.md"
    text = response.content.decode()
    head, *turns = text.split("\n\n---\n\n")
    assert head.startswith("# Import \\*script\\*\n\n*Saved on 20")
    assert turns == [
        "**You**\n\nWhy?\n  Two lines <b>",
        "**Answer**\n\n| a | b |\n| - | - |\n",
    ]


def test_an_answer_that_is_no_whole_one_says_so_and_swallows_nothing(client, bob):
    chat = services.conversation_create(bob, "Code")
    for state in (MessageState.STOPPED, MessageState.ERROR, MessageState.INTERRUPTED):
        services.message_append(chat, Role.USER, "Code, please")
        services.message_append(chat, Role.ASSISTANT, "Here:\n````py\nx = '```'\n", state=state)
    services.message_append(chat, Role.ASSISTANT, "~~~\nwhole\n~~~\nand ```one line```")
    cut = services.message_append(chat, Role.ASSISTANT, "")
    Message.objects.filter(pk=cut.pk).update(finish_reason="length")
    text = saved(client, chat).content.decode()
    for words in ("was stopped here", "broke off here", "The server ended this answer"):
        assert words in text
    assert text.count("x = '```'\n````\n\n*") == 3
    assert "and ```one line```\n\n---" in text
    assert text.endswith("**Answer**\n\n*This answer reached its longest length.*\n")


def test_a_hostile_name_is_only_a_name(client, bob):
    hostile = '../../etc/<img src=x onerror=alert(1)>"; filename="run.exe\u202egnp.bat\x07|a'
    chat = Conversation.objects.create(owner=bob, title=hostile, updated_at="2026-01-01T00:00Z")
    services.message_append(chat, Role.USER, "<script>alert(1)</script>")
    response = saved(client, chat)
    name = name_in(response)
    assert name.endswith(".md")
    assert not set('/\\:*?"<>|\u202e\x07\r\n') & set(name)
    # Downloaded whatever it looks like, and never read as a page.
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Content-Disposition"].startswith("attachment")
    assert response.headers["Content-Type"].startswith("text/markdown")
    assert "no-store" in response.headers["Cache-Control"]
    assert "# ../../etc/\\<img src=x onerror=alert(1)\\>" in response.content.decode()


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("Größe 📦 in m²", "Größe 📦 in m².md"),
        ("...", "chat.md"),
        ("\u200b\u202e", "chat.md"),
        ("con", "chat con.md"),
        ("LPT1.txt", "chat LPT1.txt.md"),
        ("a/b\\c:d", "a b c d.md"),
        (".hidden. ", "hidden.md"),
        ("x" * 120, "x" * FILE_NAME_CHARS + ".md"),
    ],
)
def test_the_name_is_one_that_every_system_takes(title, name):
    assert file_name(title) == name


def test_somebody_elses_and_a_deleted_chat_do_not_exist(client, bob, alice):
    theirs = services.conversation_create(alice, "Theirs")
    gone = services.conversation_create(bob, "Gone")
    services.conversation_delete(bob, gone.pk)
    for pk in (theirs.pk, gone.pk, uuid.uuid4()):
        response = client.get(f"/c/{pk}/export/")
        assert response.status_code == 404
        assert "Content-Disposition" not in response.headers
    assert client.post(f"/c/{gone.pk}/export/").status_code == 405
