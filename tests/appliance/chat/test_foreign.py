"""C04: what is somebody else's does not exist, over HTTP and over the socket."""

from uuid import uuid4

import pytest
from asgiref.sync import sync_to_async

from appliance.chat import services
from appliance.chat.generations import generations
from appliance.chat.models import Conversation, Message
from tests.appliance.chat.browser import holds, sign_in


async def test_another_users_running_answer_cannot_be_seen_stopped_or_joined(
    tabs, backend, alice, bob
):
    backend.hold(2)
    hers = await tabs.open(alice)
    await hers.ask("A secret question")
    conversation_id = (await hers.until("conversation.created"))["conversation"]["id"]
    await holds(backend)
    his = await tabs.open(bob)
    unknown = str(uuid4())
    answers = []
    for target in (conversation_id, unknown):
        await his.send("generation.subscribe", conversation_id=target, last_seq=0, last_position=-1)
        refused = await his.until("error")
        await his.send("generation.stop", conversation_id=target)
        await his.settled()
        await his.ask("What did she ask?", target)
        refused_start = await his.until("generation.error")
        await his.send("generation.again", conversation_id=target, client_id=str(uuid4()))
        refused_again = await his.until("generation.error")
        answers.append([(m["code"], m["message"]) for m in (refused, refused_start, refused_again)])
    assert answers[0] == answers[1]
    assert {code for code, _ in answers[0]} == {"not_found"}
    assert not his.texts
    assert generations.running_ids(alice.pk)
    backend.release()
    assert (await hers.until("generation.finished"))["message"]["state"] == "complete"
    assert await Message.objects.acount() == 2


async def test_another_users_client_id_opens_nothing(tabs, backend, alice, bob):
    hers, his = await tabs.open(alice), await tabs.open(bob)
    client_id = await hers.ask("A secret question")
    await hers.until("generation.finished")
    await his.ask("Mine", client_id=client_id)
    assert (await his.until("message.saved"))["message"]["content"] == "Mine"
    await his.until("generation.finished")


async def test_events_of_one_user_do_not_reach_another(tabs, backend, alice, bob):
    hers, his = await tabs.open(alice), await tabs.open(bob)
    await hers.answered("A secret question")
    await his.send("ping")
    assert (await his.next())["type"] == "pong"


@pytest.mark.parametrize("action", ["", "rename/", "pin/", "delete/", "restore/"])
def test_pages_and_actions_answer_404_as_for_an_unknown_id(alice, bob, action):
    conversation = services.conversation_create(alice, "A secret question")
    client = sign_in(bob)
    bodies = []
    for target in (conversation.pk, uuid4()):
        path = f"/c/{target}/{action}"
        data = {"title": "x", "pinned": "true"}
        response = client.post(path, data) if action else client.get(path)
        assert response.status_code == 404
        assert "secret" not in response.content.decode()
        if action:
            bodies.append(response.content)
    assert len(set(bodies)) <= 1
    conversation.refresh_from_db()
    assert (conversation.title, conversation.pinned) == ("A secret question", False)
    assert conversation.deleted_at is None


async def test_a_deleted_conversation_takes_no_message(tabs, backend, bob):
    tab = await tabs.open(bob)
    answer = await tab.answered("One")
    conversation = await Conversation.objects.aget()
    await sync_to_async(services.conversation_delete)(bob, conversation.pk)
    await tab.ask("Two", answer["conversation_id"])
    assert (await tab.until("generation.error"))["code"] == "not_found"


def test_search_finds_only_ones_own(alice, bob):
    services.conversation_create(alice, "A secret question")
    services.conversation_create(bob, "My own question")
    page = sign_in(bob).get("/chat/list/?q=question").content.decode()
    assert "My own question" in page
    assert "secret" not in page


@pytest.mark.parametrize("path", ["/", "/chat/list/", "/chat/state/"])
def test_nobody_is_let_in_without_signing_in(transactional_db, client, path):
    response = client.get(path, headers={"host": "localhost"})
    assert response.status_code == 302
    assert response["Location"].startswith("/login/")
