"""The chat socket through the whole application: session, start, text, stop, end."""

import asyncio
from uuid import uuid4

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError

from appliance.chat import selectors, services
from appliance.chat.generations import generations
from appliance.chat.models import Conversation, Message, MessageState
from appliance.quotas.models import UsageRecord
from appliance.serving.booking import bookings_wait
from appliance.serving.gateway import gateway_close, gateway_remove, gateway_stopping
from tests.appliance.chat.browser import WAIT_S, holds, sign_in, socket_for
from tests.appliance.limits import only_limit, tokens_a_day
from tests.appliance.scripted_stream import ScriptedStream

ANSWER = "Paris is the capital."


async def test_an_answer_streams_and_is_stored_with_what_it_cost(tabs, backend, bob):
    tab = await tabs.open(bob)
    client_id = await tab.ask("What is the capital of France?")
    created = await tab.until("conversation.created")
    assert created["client_id"] == client_id
    assert created["conversation"]["title"] == "What is the capital of France?"
    asked, answer = await tab.until("message.saved"), await tab.until("message.saved")
    assert (asked["message"]["role"], asked["message"]["client_id"]) == ("user", client_id)
    assert answer["message"]["state"] == "streaming"
    finished, quota = await tab.all_of("generation.finished", "quota.updated")
    final = finished["message"]
    assert final["content"] == ANSWER == tab.texts[final["id"]]
    assert (final["state"], final["finish_reason"]) == ("complete", "stop")
    assert (final["prompt_tokens"], final["completion_tokens"]) == (6, 5)
    assert final["ttft_s"] == 0.1
    assert quota["quota"]["used_tokens"] == 11
    stored = await Message.objects.aget(pk=final["id"])
    assert (stored.content, stored.state) == (ANSWER, MessageState.COMPLETE)


async def test_the_model_reads_the_whole_conversation(tabs, backend, bob):
    tab = await tabs.open(bob)
    first = await tab.answered("One")
    await tab.answered("Two", first["conversation_id"])
    assert [m["content"] for m in backend.requests[-1].messages] == ["One", ANSWER, "Two"]
    assert backend.requests[-1].generation_class == "interactive"
    assert backend.requests[-1].options.temperature < 1


async def test_waiting_and_reading_are_told_before_the_text(tabs, backend, bob):
    backend.queued_ahead = 2
    backend.hold(0)
    tab = await tabs.open(bob)
    await tab.ask("Hello")
    seen = [(await tab.until("generation.queued", "generation.reading"))["type"]]
    await holds(backend)
    while seen[-1] != "generation.reading":
        seen.append((await tab.until("generation.queued", "generation.reading"))["type"])
    assert not tab.texts
    backend.release()
    assert (await tab.until("generation.finished"))["message"]["content"] == ANSWER


async def test_stop_in_mid_stream_frees_the_slot_and_keeps_the_text(tabs, backend, bob):
    backend.hold(2)
    tab = await tabs.open(bob)
    await tab.ask("Tell me")
    await holds(backend)
    stream = next(iter(backend.running.values()))
    conversation_id = (await tab.until("conversation.created"))["conversation"]["id"]
    await tab.send("generation.stop", conversation_id=conversation_id)
    final = (await tab.until("generation.finished"))["message"]
    assert stream.closed
    assert not backend.running
    assert (final["state"], final["content"]) == ("stopped", "Paris is")
    assert final["completion_tokens"] == 2
    await bookings_wait(WAIT_S)
    record = await UsageRecord.objects.aget()
    assert (record.end, record.completion_tokens) == ("abort", 2)


async def test_a_new_answer_can_be_stopped_before_its_conversation_is_known(tabs, backend, bob):
    backend.hold(0)
    tab = await tabs.open(bob)
    client_id = await tab.ask("Tell me")
    await tab.send("generation.stop", conversation_id=None, client_id=client_id)
    final = await tab.until("generation.finished", "generation.error")
    assert final.get("code", "stopped") == "stopped"
    assert not backend.running


async def test_stopping_twice_or_with_nothing_running_does_no_harm(tabs, backend, bob):
    tab = await tabs.open(bob)
    answer = await tab.answered("One")
    for _ in range(2):
        await tab.send("generation.stop", conversation_id=answer["conversation_id"])
    await tab.settled()
    assert (await tab.answered("Two", answer["conversation_id"]))["state"] == "complete"


async def test_a_second_start_in_a_running_conversation_is_refused(tabs, backend, bob):
    """C03, C05: two prompts at once have one rule."""
    backend.hold(1)
    tab, other = await tabs.open(bob), await tabs.open(bob)
    await tab.ask("One")
    await holds(backend)
    conversation_id = (await tab.until("conversation.created"))["conversation"]["id"]
    for sender in (tab, other):
        await sender.ask("Two", conversation_id)
        refused = await sender.until("generation.error")
        assert refused["code"] == "conflict"
        assert "still being written" in refused["message"]
    backend.release()
    await tab.until("generation.finished")
    assert await Message.objects.acount() == 2


async def test_the_same_client_id_starts_one_answer(tabs, backend, bob):
    backend.hold(1)
    tab = await tabs.open(bob)
    client_id = await tab.ask("One")
    await holds(backend)
    again = await tabs.open(bob)
    await again.ask("One", client_id=client_id)
    await again.until("generation.delta")
    backend.release()
    final = (await again.until("generation.finished"))["message"]
    assert final["content"] == ANSWER == again.texts[final["id"]]
    # Also after it has ended: what was stored is sent again.
    await again.ask("One", client_id=client_id)
    assert (await again.until("conversation.created"))["client_id"] == client_id
    sent = [await again.until("message.saved") for _ in range(2)]
    assert [m["message"]["content"] for m in sent] == ["One", ANSWER]
    assert len(backend.requests) == 1


async def test_answer_again_takes_the_place_of_the_last_answer(tabs, backend, bob):
    tab = await tabs.open(bob)
    first = await tab.answered("One")
    backend.words = ("Better", ".")
    await tab.send(
        "generation.again", conversation_id=first["conversation_id"], client_id=str(uuid4())
    )
    saved = await tab.until("message.saved")
    # Only the question stands before it: what a page shows between them is replaced.
    assert saved["follows"] == first["position"] - 1
    second = (await tab.until("generation.finished"))["message"]
    assert second["content"] == "Better."
    assert [m["content"] for m in backend.requests[-1].messages] == ["One"]
    conversation = await Conversation.objects.aget()
    shown = await sync_to_async(services.messages_shown)(conversation.pk, running=False)
    assert [m.content for m in shown] == ["One", "Better."]


# ---- refused at the door: nothing is saved, the reason is told


@pytest.mark.parametrize("how", ["no model", "down", "stopping"])
async def test_an_engine_that_is_not_there_is_told_and_nothing_is_kept(tabs, backend, bob, how):
    tab = await tabs.open(bob)
    if how == "no model":
        gateway_remove()
    elif how == "down":
        backend.down = True
    else:
        gateway_close()
    await tab.ask("Hello")
    error = await tab.until("generation.error")
    assert error["code"] == "engine_unavailable"
    assert error["message"]
    assert error["hint"]
    assert not await Conversation.objects.aexists()


@pytest.mark.parametrize(
    ("owner", "name"),
    [(services, "generation_start"), (services, "generation_history"), (selectors, "sent_before")],
)
async def test_d12_a_database_that_takes_nothing_is_told_and_the_socket_stays(
    tabs, backend, bob, monkeypatch, owner, name
):
    def full(*args, **kwargs):
        raise OperationalError("database or disk is full")

    tab = await tabs.open(bob)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        client_id = await tab.ask("Hello")
        error = await tab.until("generation.error")
    assert (error["code"], error["client_id"]) == ("storage_unavailable", client_id)
    assert error["hint"]
    assert not backend.running
    assert (await tab.answered("Hello"))["content"] == ANSWER


async def test_a_spent_quota_is_told_with_the_time_of_its_reset(tabs, backend, bob):
    await sync_to_async(tokens_a_day)(bob, 10)
    tab = await tabs.open(bob)
    await tab.ask("Hello")
    error = await tab.until("generation.error")
    assert error["code"] == "insufficient_quota"
    assert "10" in error["message"]
    assert not await Conversation.objects.aexists()
    assert not backend.requests


async def test_a_wait_for_a_limit_is_told_with_its_place_and_can_be_stopped(tabs, backend, bob):
    await sync_to_async(only_limit)("concurrent_requests", 1, wait_s=60)
    backend.hold(0)
    tab = await tabs.open(bob)
    await tab.ask("First")
    await holds(backend)
    for ahead, text in enumerate(("Second", "Third")):
        # One after the other: each is a task of its own, and the first to reach the queue is first.
        asked = await tab.ask(text)
        queued = await tab.until("generation.queued")
        assert (queued["client_id"], queued["ahead"]) == (asked, ahead)
    leaves = asked
    await tab.send("generation.stop", conversation_id=None, client_id=leaves)
    assert (await tab.until("generation.error"))["client_id"] == leaves
    backend.release()
    ends = [(await tab.until("generation.finished"))["message"]["state"] for _ in range(2)]
    assert ends == ["complete", "complete"]
    assert [r.messages[0]["content"] for r in backend.requests] == ["First", "Second"]


async def test_a_conversation_over_the_context_is_refused_and_not_cut(tabs, backend, bob):
    """A11: nothing is dropped silently; the conversation stays as it was and can go on."""
    tab = await tabs.open(bob)
    first = await tab.answered("codeword " * 990)
    await tab.ask("word " * 20, first["conversation_id"])
    error = await tab.until("generation.error")
    assert error["code"] == "context_length_exceeded"
    assert "1014" in error["message"]
    assert "new chat" in error["hint"]
    assert await Message.objects.acount() == 2
    await tab.answered("ok", first["conversation_id"])
    assert backend.requests[-1].messages[0]["content"].startswith("codeword")


# ---- broken off after the start


async def test_a_failure_in_mid_stream_is_no_complete_answer(tabs, backend, bob):
    """B08: the row has status error, the partial text, and the tokens that were made."""
    backend.fail_after = 2
    tab = await tabs.open(bob)
    final = await tab.answered("Tell me")
    assert (final["state"], final["finish_reason"]) == ("error", "error")
    assert final["error"] == "The model stopped working."
    assert final["content"] == "Paris is"
    stored = await Message.objects.aget(pk=final["id"])
    assert (stored.state, stored.content) == (MessageState.ERROR, "Paris is")
    await bookings_wait(WAIT_S)
    assert (await UsageRecord.objects.aget()).completion_tokens == 2


async def test_an_admins_abort_is_shown_as_interrupted(tabs, backend, bob):
    backend.hold(2)
    tab = await tabs.open(bob)
    await tab.ask("Tell me")
    await holds(backend)
    backend.abort(next(iter(backend.running)))
    backend.release()
    final = (await tab.until("generation.finished"))["message"]
    assert (final["state"], final["content"]) == ("interrupted", "Paris is")
    assert "admin" in final["error"]


async def test_a_broken_stream_ends_with_a_general_error(tabs, backend, bob, monkeypatch, caplog):
    """B08: no traceback reaches the browser."""

    class Boom(ScriptedStream):
        request_id, prompt_tokens, cached_tokens, completion_tokens = "r", 1, 0, 0

        async def events(self):
            raise RuntimeError("secret detail")
            yield

    async def generate(prepared):
        return Boom()

    monkeypatch.setattr(backend, "generate", generate)
    tab = await tabs.open(bob)
    final = await tab.answered("Tell me")
    assert final["state"] == "error"
    assert "secret" not in str(final)
    assert "secret detail" in caplog.text


async def test_shutdown_saves_the_partial_text_as_interrupted(tabs, backend, bob):
    backend.hold(2)
    tab = await tabs.open(bob)
    await tab.ask("Tell me")
    await holds(backend)
    gateway_close()
    await gateway_stopping(WAIT_S)
    stored = await Message.objects.aget(role="assistant")
    assert (stored.state, stored.content) == (MessageState.INTERRUPTED, "Paris is")
    assert (await tab.until("generation.finished"))["message"]["state"] == "interrupted"
    await tab.ask("More")
    assert (await tab.until("generation.error"))["code"] == "engine_unavailable"


async def test_a_waiting_answer_ends_as_interrupted_when_the_server_stops(tabs, backend, bob):
    """D08"""
    backend.refuse_waiting = True
    backend.hold(0)
    tab = await tabs.open(bob)
    await tab.ask("Tell me")
    await holds(backend)
    gateway_close()
    backend.release()
    final = (await tab.until("generation.finished"))["message"]
    assert (final["state"], final["content"]) == ("interrupted", "")
    assert final["error"] == "The server was stopped before this answer began. Ask again."


# ---- the session


async def test_without_a_session_the_socket_is_refused_before_it_opens(transactional_db):
    socket = socket_for(None)
    connected, code = await socket.connect(timeout=WAIT_S)
    assert (connected, code) == (False, 4401)


@pytest.mark.parametrize(
    "origin", [None, b"null", b"", b"https://evil.example", b"http://localhost.evil.example"]
)
async def test_a_page_of_another_origin_gets_no_socket(transactional_db, bob, origin):
    """C01"""
    client = await sync_to_async(sign_in)(bob)
    connected, code = await socket_for(client, origin=origin).connect(timeout=WAIT_S)
    assert (connected, code) == (False, 4403)


async def test_signing_out_closes_the_sockets_and_stops_the_answers_of_that_session(
    tabs, backend, bob
):
    backend.hold(2)
    tab = await tabs.open(bob)
    elsewhere = await tabs.open(bob)
    await tab.ask("Tell me")
    await holds(backend)
    await sync_to_async(tab.client.logout)()
    assert await tab.closed_with() == 4401
    await elsewhere.settled()
    assert not backend.running
    await asyncio.wait_for(_ended(bob), WAIT_S)
    stored = await Message.objects.aget(role="assistant")
    assert (stored.state, stored.content) == (MessageState.STOPPED, "Paris is")


async def test_a_switched_off_account_loses_its_sockets_and_answers(tabs, backend, bob):
    backend.hold(2)
    tab = await tabs.open(bob)
    await tab.ask("Tell me")
    await holds(backend)
    bob.is_active = False
    await bob.asave()
    await generations.check_sessions()
    assert await tab.closed_with() == 4401
    assert not backend.running


async def test_a_new_password_ends_the_sockets_of_other_sessions(tabs, backend, bob):
    tab = await tabs.open(bob)
    await generations.check_sessions()
    await tab.settled()
    await sync_to_async(bob.set_password)("nine-Lanterns-burn")
    await bob.asave()
    await generations.check_sessions()
    assert await tab.closed_with() == 4401


async def _ended(user):
    while generations.running_ids(user.pk):
        await asyncio.sleep(0)
