"""An answer lives in the server, not in a tab: reload, second tab, lost connection, slow reader."""

import asyncio

from asgiref.sync import sync_to_async
from django.utils import timezone

from appliance.chat import services
from appliance.chat.generations import generations
from appliance.chat.models import Conversation, Message, MessageState, Role
from tests.appliance.chat.browser import WAIT_S, holds, sign_in

ANSWER = "Paris is the capital."


async def conversation_of(tab):
    return (await tab.until("conversation.created"))["conversation"]["id"]


async def test_a_tab_that_leaves_does_not_stop_its_answer(tabs, backend, bob):
    backend.hold(2)
    tab = await tabs.open(bob)
    await tab.ask("Tell me")
    await holds(backend)
    await tab.close()
    assert backend.running
    backend.release()
    while generations.running_ids(bob.pk):
        await asyncio.sleep(0)
    stored = await Message.objects.aget(role="assistant")
    assert (stored.state, stored.content) == (MessageState.COMPLETE, ANSWER)


async def test_a_reload_in_mid_answer_gets_all_of_it_once(tabs, backend, bob):
    """C05"""
    backend.hold(2)
    tab = await tabs.open(bob)
    await tab.ask("Tell me")
    conversation_id = await conversation_of(tab)
    await holds(backend)
    await tab.close()
    again = await tabs.open(bob)
    await again.send("generation.subscribe", conversation_id=conversation_id, last_seq=0)
    first = await again.until("generation.delta")
    assert (first["from_seq"], first["text"]) == (0, "Paris is")
    backend.release()
    final = (await again.until("generation.finished"))["message"]
    assert again.texts[final["id"]] == ANSWER == final["content"]
    assert again.gaps == 0


async def test_a_lost_connection_resumes_at_the_number_it_has(tabs, backend, bob):
    """C05"""
    backend.hold(2)
    tab = await tabs.open(bob)
    await tab.ask("Tell me")
    conversation_id = await conversation_of(tab)
    while (delta := await tab.until("generation.delta"))["seq"] < len("Paris is"):
        pass
    await holds(backend)
    await tab.close()
    again = await tabs.open(bob)
    again.texts, again.seqs = dict(tab.texts), dict(tab.seqs)
    await again.send(
        "generation.subscribe",
        conversation_id=conversation_id,
        last_seq=delta["seq"],
        message_id=delta["message_id"],
    )
    await again.settled()
    backend.release()
    assert (await again.until("generation.delta"))["from_seq"] == len("Paris is")
    await again.until("generation.finished")
    assert again.texts[delta["message_id"]] == ANSWER
    assert again.gaps == 0


async def test_a_number_of_another_answer_is_not_believed(tabs, backend, bob):
    backend.hold(3)
    tab = await tabs.open(bob)
    await tab.ask("Tell me")
    conversation_id = await conversation_of(tab)
    await holds(backend)
    await tab.send(
        "generation.subscribe", conversation_id=conversation_id, last_seq=2, message_id=999_999
    )
    await tab.settled()
    backend.release()
    final = (await tab.until("generation.finished"))["message"]
    assert tab.texts[final["id"]] == ANSWER


async def test_two_tabs_end_with_the_same_text_and_either_may_stop(tabs, backend, bob):
    """C05: Stop in one tab ends the answer in both."""
    backend.hold(2)
    tab, other = await tabs.open(bob), await tabs.open(bob)
    await tab.ask("Tell me")
    told = await other.until("conversation.updated")
    assert told["running"] is True
    conversation_id = told["conversation"]["id"]
    await other.send("generation.subscribe", conversation_id=conversation_id, last_seq=0)
    await other.until("generation.delta")
    await holds(backend)
    await other.send("generation.stop", conversation_id=conversation_id)
    ends = [(await t.until("generation.finished"))["message"] for t in (tab, other)]
    assert ends[0] == ends[1]
    assert ends[0]["state"] == "stopped"
    assert tab.texts == other.texts == {ends[0]["id"]: "Paris is"}


async def test_reconnecting_after_the_end_brings_what_was_missed(tabs, backend, bob):
    """C05"""
    tab = await tabs.open(bob)
    first = await tab.answered("One")
    await tab.close()
    elsewhere = await tabs.open(bob)
    await elsewhere.answered("Two", first["conversation_id"])
    again = await tabs.open(bob)
    await again.send(
        "generation.subscribe",
        conversation_id=first["conversation_id"],
        last_seq=5,
        message_id=first["id"],
        last_position=first["position"],
    )
    missed = [(await again.until("message.saved"))["message"] for _ in range(2)]
    assert [m["content"] for m in missed] == ["Two", ANSWER]
    assert (await again.until("generation.idle"))["conversation_id"] == first["conversation_id"]


async def test_a_long_answer_reaches_a_slow_reader_whole(tabs, backend, bob):
    """D01: 2,000 pieces; one tab reads nothing until the answer has long ended."""
    backend.words = tuple(f"{number} " for number in range(900))
    slow, quick = await tabs.open(bob), await tabs.open(bob)
    await slow.ask("Count")
    conversation_id = (await quick.until("conversation.updated"))["conversation"]["id"]
    await quick.send("generation.subscribe", conversation_id=conversation_id, last_seq=0)
    while generations.running_ids(bob.pk):
        await asyncio.sleep(0)
    final = (await slow.until("generation.finished"))["message"]
    assert final["content"] == "".join(backend.words) == slow.texts[final["id"]]
    assert slow.gaps == 0
    stored = await Message.objects.aget(pk=final["id"])
    assert stored.content == final["content"]


async def test_pieces_of_a_fast_model_are_merged_into_few_frames(tabs, backend, bob):
    """D01: what a tab is sent is bounded by time, not by tokens."""
    backend.words = tuple(f"{number} " for number in range(900))
    tab = await tabs.open(bob)
    await tab.ask("Count")
    num_frames = 0
    while (message := await tab.next())["type"] != "generation.finished":
        num_frames += message["type"] == "generation.delta"
    assert message["message"]["content"] == "".join(backend.words)
    assert num_frames < 450


async def test_the_database_is_not_written_per_token(tabs, backend, bob, monkeypatch):
    written = []
    for name in ("generation_checkpoint", "generation_finish", "generation_start"):
        real = getattr(services, name)
        monkeypatch.setattr(
            services,
            name,
            lambda *args, real=real, name=name, **kwargs: (
                written.append(name),
                real(*args, **kwargs),
            )[1],
        )
    tab = await tabs.open(bob)
    await tab.answered("Tell me")
    assert written == ["generation_start", "generation_finish"]


async def test_the_text_so_far_is_kept_for_the_case_that_the_process_dies(
    tabs, backend, bob, monkeypatch
):
    monkeypatch.setattr("appliance.chat.generation.CHECKPOINT_S", -1)
    saved = asyncio.Event()
    loop = asyncio.get_running_loop()
    real = services.generation_checkpoint

    def checkpoint(message_id, content):
        real(message_id, content)
        loop.call_soon_threadsafe(saved.set)

    monkeypatch.setattr(services, "generation_checkpoint", checkpoint)
    backend.hold(2)
    tab = await tabs.open(bob)
    await tab.ask("Tell me")
    await holds(backend)
    await asyncio.wait_for(saved.wait(), WAIT_S)
    stored = await Message.objects.aget(role="assistant")
    assert stored.state == MessageState.STREAMING
    assert "Paris is".startswith(stored.content)
    assert stored.content


async def test_an_answer_left_by_a_server_that_died_is_marked_interrupted(tabs, backend, bob):
    conversation = await sync_to_async(services.conversation_create)(bob, "Hello")
    await sync_to_async(services.message_append)(conversation, Role.USER, "Hello")
    left = await sync_to_async(services.message_append)(
        conversation, Role.ASSISTANT, "Half an ans", state=MessageState.STREAMING
    )
    await Message.objects.filter(pk=left.pk).aupdate(
        begun_at=timezone.now() - services.ORPHAN_AFTER * 2
    )
    tab = await tabs.open(bob)
    await tab.send(
        "generation.subscribe", conversation_id=str(conversation.pk), last_seq=0, last_position=0
    )
    shown = (await tab.until("message.saved"))["message"]
    assert (shown["state"], shown["content"]) == ("interrupted", "Half an ans")
    assert shown["error"]
    await tab.until("generation.idle")
    # The page shows the same, and the conversation goes on from the partial text.
    client = await sync_to_async(sign_in)(bob)
    page = await sync_to_async(client.get)(f"/c/{conversation.pk}/")
    assert "Half an ans" in page.content.decode()
    await tab.answered("Go on", str(conversation.pk))
    assert [m["content"] for m in backend.requests[-1].messages] == [
        "Hello",
        "Half an ans",
        "Go on",
    ]


async def test_deleting_a_conversation_stops_its_answer(tabs, backend, bob):
    backend.hold(1)
    tab = await tabs.open(bob)
    await tab.ask("Tell me")
    conversation_id = await conversation_of(tab)
    await holds(backend)
    client = await sync_to_async(sign_in)(bob)
    response = await sync_to_async(client.post)(f"/c/{conversation_id}/delete/")
    assert response.status_code == 200
    _, final = await tab.all_of("conversation.deleted", "generation.finished")
    assert final["message"]["state"] == "stopped"
    assert not backend.running
    assert (await Conversation.objects.aget()).deleted_at is not None
