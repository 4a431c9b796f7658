"""A message of one's own is put in other words, over the whole application."""

from uuid import uuid4

import pytest

from appliance.chat.models import Message
from tests.appliance.chat.browser import holds


@pytest.fixture
async def talk(tabs, bob):
    """A chat of two questions; the tab that asked, and its messages in order."""
    tab = await tabs.open(bob)
    answer = await tab.answered("One")
    await tab.answered("Two", answer["conversation_id"])
    return tab, [message async for message in Message.objects.order_by("position")]


async def edit(tab, message, text, **fields):
    about = {"conversation_id": str(message.conversation_id), "message_id": message.pk}
    fields.setdefault("client_id", str(uuid4()))
    await tab.send("generation.edit", text=text, **{**about, **fields})


async def test_the_model_reads_the_new_words_and_nothing_that_came_after(talk, backend):
    tab, (first, *_) = talk
    await edit(tab, first, "Other")
    asked, answer = await tab.until("message.saved"), await tab.until("message.saved")
    assert (asked["message"]["content"], asked["follows"]) == ("Other", -1)
    assert answer["follows"] == asked["message"]["position"]
    await tab.until("generation.finished")
    assert [m["content"] for m in backend.requests[-1].messages] == ["Other"]


async def test_a_tab_that_was_away_learns_what_was_replaced(talk, tabs, bob):
    tab, (first, *_, last) = talk
    await edit(tab, first, "Other")
    await tab.until("generation.finished")
    late = await tabs.open(bob)
    about = {"conversation_id": str(first.conversation_id), "last_seq": 0}
    await late.send("generation.subscribe", last_position=last.position, **about)
    saved = [await late.until("message.saved") for _ in range(2)]
    assert (saved[0]["message"]["content"], saved[0]["follows"]) == ("Other", -1)


async def test_sending_it_twice_edits_once(talk, backend):
    tab, (_, _, second, _) = talk
    client_id = str(uuid4())
    await edit(tab, second, "Other", client_id=client_id)
    await tab.until("generation.finished")
    await edit(tab, second, "Other", client_id=client_id)
    assert (await tab.until("message.saved"))["message"]["content"] == "Other"
    assert len(backend.requests) == 3


async def test_a_refused_edit_changes_nothing(talk, backend):
    tab, (first, *_, answer) = talk
    await edit(tab, first, "word " * 5000)
    refused = await tab.until("generation.error")
    assert refused["code"] == "context_length_exceeded"
    for message in (answer, first):
        await edit(tab, message, "Other", message_id=message.pk + 1_000)
        assert (await tab.until("generation.error"))["code"] == "conflict"
    assert await Message.objects.filter(superseded=False).acount() == 4


async def test_nothing_is_edited_while_an_answer_is_written(talk, backend):
    tab, (first, *_) = talk
    backend.hold(1)
    await tab.ask("Three", str(first.conversation_id))
    await holds(backend)
    await edit(tab, first, "Other")
    assert (await tab.until("generation.error"))["code"] == "conflict"
    backend.release()
    await tab.until("generation.finished")
    assert not await Message.objects.filter(superseded=True).aexists()


async def test_somebody_elses_message_does_not_exist(talk, tabs, alice):
    _, (first, *_) = talk
    tab = await tabs.open(alice)
    await edit(tab, first, "Mine now")
    assert (await tab.until("generation.error"))["code"] == "not_found"
    assert not await Message.objects.filter(content="Mine now").aexists()
