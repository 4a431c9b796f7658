"""The team's instructions: what admins put before every chat."""

import asyncio

import pytest
from asgiref.sync import sync_to_async
from django.test import Client

from appliance.chat.instructions import (
    VERSIONS_KEPT,
    instructions_check,
    instructions_now,
    instructions_save,
    instructions_text,
)
from appliance.chat.models import TeamInstructions
from appliance.console.audit import audit_words
from appliance.console.models import AuditRecord
from appliance.errors import BadRequest, Conflict, EngineUnavailable
from appliance.serving.chat_settings import chat_settings_apply
from appliance.serving.engine_backend import EngineBackend
from appliance.serving.gateway import gateway_install
from tests.appliance.chat.browser import WAIT_S, sign_in
from tests.inference.chat_templates import chatml_folder
from tests.inference.helpers import FakeRunner

PAGE = "/console/instructions/"
KIND = "Be kind to the customers."


@pytest.fixture
def admin(alice, backend) -> Client:
    return sign_in(alice)


def save(client, text, version=None, **fields):
    now = instructions_now()
    version = (now.pk if now else 0) if version is None else version
    return client.post(PAGE, {"text": text, "version": version, **fields})


# ---- what holds


async def test_they_go_before_every_chat_from_the_next_answer_on(tabs, backend, bob, alice):
    tab = await tabs.open(bob)
    first = await tab.answered("One")
    assert backend.requests[-1].server_prompt is None
    await sync_to_async(instructions_save)(KIND, alice, if_version=0)
    await tab.answered("Two", first["conversation_id"])
    asked = backend.requests[-1]
    assert asked.server_prompt == KIND
    # They are no message of anybody's chat.
    assert [m["role"] for m in asked.messages] == ["user", "assistant", "user"]
    now = await sync_to_async(instructions_now)()
    await sync_to_async(instructions_save)("", alice, if_version=now.pk)
    await tab.answered("Three", first["conversation_id"])
    assert backend.requests[-1].server_prompt is None


async def test_a_model_without_room_for_them_answers_without_them(tabs, backend, bob, alice):
    """As after a change to a smaller model: no chat may break of it."""
    await sync_to_async(instructions_save)("word " * 400, alice, if_version=0)
    tab = await tabs.open(bob)
    assert (await tab.answered("One"))["state"] == "complete"
    assert backend.requests[-1].server_prompt is None
    html = (await sync_to_async((await sync_to_async(sign_in)(alice)).get)(PAGE)).content.decode()
    assert "so they are left out" in html
    html = (await sync_to_async(tab.client.get)("/")).content.decode()
    assert "word word" not in html


async def test_members_share_their_blocks_and_nothing_that_a_member_wrote(
    tabs, bob, alice, tmp_path
):
    text = "Answer the team of the shop in short words. " * 2
    # Long answers would take the blocks away.
    chat_settings_apply({"chat_max_tokens": 16})
    folder, runner = chatml_folder(tmp_path), FakeRunner(max_model_len=2000)
    engine = EngineBackend(lambda report: folder, lambda config: runner, config={"max_num_seqs": 4})
    engine.start()
    gateway_install(engine)
    try:
        async with asyncio.timeout(WAIT_S):
            while engine.state()["state"] != "ready":
                await asyncio.sleep(0.01)
        kept = await instructions_check(text)
        await sync_to_async(instructions_save)(kept, alice, if_version=0)
        question = "a private question " * 4
        mine, theirs, again = [
            await (await tabs.open(user)).answered(question) for user in (bob, alice, bob)
        ]
        assert mine["cached_tokens"] == 0
        # Whole blocks of the instructions, and no more of the same question than the template.
        assert len(text) // 2 < theirs["cached_tokens"] < len(text) + 32
        assert again["cached_tokens"] > theirs["cached_tokens"] + 32
    finally:
        await engine.stop(0.0)


# ---- changing them


@pytest.mark.django_db(transaction=True)
def test_an_admin_saves_them_and_the_history_says_so(admin, alice):
    saved = save(admin, f"  {KIND}\r\nSecond line\x00 \n")
    assert saved.status_code == 302
    assert instructions_text() == f"{KIND}\nSecond line"
    html = admin.get(PAGE).content.decode()
    assert f"{KIND}\nSecond line</textarea>" in html
    assert "8 tokens · saved by alice" in html
    record = AuditRecord.objects.get()
    assert (record.actor, record.action) == (alice, "chat.instructions")
    assert record.detail["text"] == f"{KIND}\nSecond line"
    assert audit_words(record) == f"Changed the team's instructions to “{KIND} Second line”"
    # The same again is no act; nothing at all is one.
    assert save(admin, f"{KIND}\nSecond line").status_code == 302
    assert AuditRecord.objects.count() == 1
    save(admin, " \n ")
    assert instructions_text() == ""
    assert audit_words(AuditRecord.objects.first()) == "Changed the team's instructions to none"
    assert "chat" in admin.get("/console/history/?kind=chat").content.decode()


@pytest.mark.django_db(transaction=True)
def test_too_long_is_refused_with_the_numbers_and_what_was_written_stays(admin):
    answer = save(admin, "word " * 300)
    assert answer.status_code == 400
    html = answer.content.decode()
    assert "301 tokens for scripted; at most 250 of the 1,000" in html
    assert ("word " * 300).strip() in html
    for text in ("word " * 5000, "x" * 100_001):
        assert save(admin, text).status_code == 400
    assert not TeamInstructions.objects.exists()
    assert save(admin, "word " * 249).status_code == 302


@pytest.mark.django_db(transaction=True)
def test_without_a_model_nothing_is_saved_but_they_can_be_taken_away(admin, backend, alice):
    instructions_save(KIND, alice, if_version=0)
    backend.down = True
    answer = save(admin, "Other words")
    assert answer.status_code == EngineUnavailable.status
    assert "Other words</textarea>" in answer.content.decode()
    assert instructions_text() == KIND
    assert admin.get(PAGE).status_code == 200
    save(admin, "")
    assert instructions_text() == ""


@pytest.mark.django_db(transaction=True)
def test_two_admins_at_a_time_do_not_overwrite_each_other(admin, alice):
    instructions_save(KIND, alice, if_version=0)
    answer = save(admin, "Mine", version=0)
    assert answer.status_code == Conflict.status
    html = answer.content.decode()
    assert "alice changed the instructions meanwhile" in html
    assert "Mine</textarea>" in html
    assert instructions_text() == KIND
    # The page knows the newest version now.
    assert f'name="version" value="{instructions_now().pk}"' in html


@pytest.mark.django_db(transaction=True)
def test_an_earlier_version_is_used_again(admin, alice):
    save(admin, KIND)
    first = instructions_now().pk
    save(admin, "Second")
    assert "Use again" in admin.get(PAGE).content.decode()
    save(admin, "", again=first)
    assert instructions_text() == KIND
    for bad in ("0", "x", "9" * 30, "²"):
        assert save(admin, "", again=bad).status_code == 404
    assert instructions_text() == KIND


@pytest.mark.django_db
def test_only_the_newest_versions_are_kept(alice):
    for number in range(VERSIONS_KEPT + 3):
        now = instructions_now()
        instructions_save(f"Version {number}", alice, if_version=now.pk if now else 0)
    assert TeamInstructions.objects.count() == VERSIONS_KEPT
    assert instructions_text() == f"Version {VERSIONS_KEPT + 2}"


# ---- who may


@pytest.mark.django_db(transaction=True)
def test_members_read_them_where_a_chat_starts_and_change_nothing(backend, alice, bob):
    instructions_save("<b>Be kind</b> & brief", alice, if_version=0)
    member = sign_in(bob)
    assert "&lt;b&gt;Be kind&lt;/b&gt; &amp; brief" in member.get("/").content.decode()
    assert member.get(PAGE).status_code == 403
    assert save(member, "Mine").status_code == 403
    assert instructions_text() == "<b>Be kind</b> & brief"


@pytest.mark.django_db(transaction=True)
def test_a_form_of_another_page_changes_nothing(admin, alice):
    strict = Client(enforce_csrf_checks=True, headers={"host": "localhost"})
    strict.force_login(alice)
    assert save(strict, KIND).status_code == 403
    assert instructions_text() == ""


async def test_what_the_model_refuses_to_read_is_refused(backend):
    with pytest.raises(BadRequest):
        await instructions_check("word " * 5000)
