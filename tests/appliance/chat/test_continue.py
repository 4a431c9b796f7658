"""An answer that was cut off goes on in its own message, over the whole application."""

from uuid import uuid4

import pytest
from asgiref.sync import sync_to_async

from appliance.chat.models import Message, MessageState
from appliance.quotas.models import UsageRecord
from appliance.serving.booking import bookings_wait
from appliance.serving.chat_settings import chat_settings_apply
from tests.appliance.chat.browser import WAIT_S, holds, sign_in
from tests.appliance.limits import tokens_a_day

BEGUN, REST = "Paris is", " the capital."


@pytest.fixture
async def cut(tabs, backend, bob):
    """An answer that ended at two tokens, and the tab that asked for it."""
    chat_settings_apply({"chat_max_tokens": 2})
    tab = await tabs.open(bob)
    answer = await tab.answered("What is the capital?")
    assert (answer["content"], answer["finish_reason"]) == (BEGUN, "length")
    backend.words = (" the", " capital", ".")
    chat_settings_apply({"chat_max_tokens": 3})
    return tab, answer


async def go_on(tab, answer, **fields):
    about = {"conversation_id": answer["conversation_id"], "message_id": answer["id"]}
    fields.setdefault("client_id", str(uuid4()))
    await tab.send("generation.continue", **{**about, **fields})


async def gone_on(tab, answer, **fields):
    await go_on(tab, answer, **fields)
    return (await tab.until("generation.finished", "generation.error")).get("message")


async def test_the_answer_goes_on_in_its_own_message(cut, backend):
    tab, answer = cut
    whole = await gone_on(tab, answer)
    assert whole["id"] == answer["id"]
    assert whole["content"] == BEGUN + REST == tab.texts[answer["id"]]
    assert (whole["state"], whole["finish_reason"]) == ("complete", "stop")
    assert (whole["prompt_tokens"], whole["completion_tokens"]) == (4, 5)
    assert await Message.objects.acount() == 2
    asked = backend.requests[-1]
    assert asked.continue_final_message
    assert asked.messages[-1] == {"role": "assistant", "content": BEGUN}
    assert asked.options.max_tokens == 3


async def test_each_part_is_a_generation_of_its_own_in_the_ledger(cut):
    tab, answer = cut
    await gone_on(tab, answer)
    await bookings_wait(WAIT_S)
    rows = [row async for row in UsageRecord.objects.order_by("pk")]
    assert [(row.prompt_tokens, row.completion_tokens, row.end) for row in rows] == [
        (4, 2, "length"),
        (6, 3, "stop"),
    ]


async def test_a_reload_in_mid_part_and_a_second_tab_get_the_whole_text(cut, backend, tabs, bob):
    tab, answer = cut
    backend.hold(1)
    await go_on(tab, answer)
    while (await tab.until("generation.delta"))["completion_tokens"] < 1:
        pass
    await holds(backend)
    client = await sync_to_async(sign_in)(bob)
    page = await sync_to_async(client.get)(f"/c/{answer['conversation_id']}/")
    assert f'data-id="{answer["id"]}"' in page.content.decode()
    await tab.close()
    again, other = await tabs.open(bob), await tabs.open(bob)
    again.texts, again.seqs = dict(tab.texts), dict(tab.seqs)
    # One tab kept what it had, one has the number of another text, one has nothing.
    about = {"conversation_id": answer["conversation_id"], "message_id": answer["id"]}
    await again.send("generation.subscribe", last_seq=tab.seqs[answer["id"]], **about)
    await other.send("generation.subscribe", last_seq=0, **about)
    assert (await other.until("generation.delta"))["text"] == "Paris is the"
    await again.settled()
    backend.release()
    for each in (again, other):
        whole = (await each.until("generation.finished"))["message"]
        assert each.texts[answer["id"]] == BEGUN + REST == whole["content"]
        assert each.gaps == 0


async def test_a_tab_that_fell_asleep_in_the_first_part_lacks_nothing_of_the_second(
    cut, backend, tabs, bob
):
    """Its number is of the same text, whoever wrote it."""
    tab, answer = cut
    backend.hold(2)
    await go_on(tab, answer)
    await holds(backend)
    late = await tabs.open(bob)
    late.texts, late.seqs = {answer["id"]: "Paris"}, {answer["id"]: 5}
    await late.send(
        "generation.subscribe",
        conversation_id=answer["conversation_id"],
        message_id=answer["id"],
        last_seq=5,
    )
    await late.until("generation.delta")
    backend.release()
    await late.until("generation.finished")
    assert late.texts[answer["id"]] == BEGUN + REST
    assert late.gaps == 0


async def test_stop_keeps_both_parts_and_it_can_go_on_again(cut, backend):
    tab, answer = cut
    backend.hold(1)
    await go_on(tab, answer)
    await holds(backend)
    await tab.send("generation.stop", conversation_id=answer["conversation_id"])
    stopped = (await tab.until("generation.finished"))["message"]
    assert (stopped["state"], stopped["content"]) == ("stopped", "Paris is the")
    assert stopped["completion_tokens"] == 3
    backend.release()
    backend.words = (" capital", ".")
    whole = await gone_on(tab, answer)
    assert (whole["state"], whole["content"]) == ("complete", BEGUN + REST)


async def test_the_text_before_is_kept_when_the_model_fails(cut, backend):
    tab, answer = cut
    backend.fail_after = 1
    broken = await gone_on(tab, answer)
    assert (broken["state"], broken["content"]) == ("error", "Paris is the")
    stored = await Message.objects.aget(pk=answer["id"])
    assert (stored.state, stored.content) == (MessageState.ERROR, "Paris is the")


async def test_sending_it_twice_goes_on_once(cut, backend):
    tab, answer = cut
    client_id = str(uuid4())
    whole = await gone_on(tab, answer, client_id=client_id)
    await go_on(tab, answer, client_id=client_id)
    assert (await tab.until("message.saved"))["message"] == whole
    assert len(backend.requests) == 2


async def test_a_whole_answer_has_no_more(cut, backend):
    tab, answer = cut
    await gone_on(tab, answer)
    await go_on(tab, answer)
    refused = await tab.until("generation.error")
    assert refused["code"] == "conflict"
    assert "come to its end" in refused["message"]
    assert len(backend.requests) == 2


async def test_a_full_chat_is_refused_and_says_to_start_a_new_one(tabs, backend, bob):
    tab = await tabs.open(bob)
    backend.words = tuple(f" w{number}" for number in range(2000))
    chat_settings_apply({"chat_max_tokens": 100_000})
    answer = await tab.answered("word " * 200)
    assert answer["finish_reason"] == "length"
    await go_on(tab, answer)
    refused = await tab.until("generation.error")
    assert refused["code"] == "context_length_exceeded"
    assert "new chat" in refused["hint"]
    stored = await Message.objects.aget(pk=answer["id"])
    assert (stored.state, stored.content) == (MessageState.COMPLETE, answer["content"])


async def test_a_spent_quota_refuses_it_and_changes_nothing(cut, bob):
    tab, answer = cut
    await sync_to_async(tokens_a_day)(bob, 10)
    await go_on(tab, answer)
    refused = await tab.until("generation.error")
    assert refused["code"] == "insufficient_quota"
    assert "still below" not in refused["hint"]
    stored = await Message.objects.aget(pk=answer["id"])
    assert (stored.state, stored.finish_reason) == (MessageState.COMPLETE, "length")


async def test_somebody_elses_answer_does_not_exist(cut, tabs, backend, alice):
    _, answer = cut
    tab = await tabs.open(alice)
    await go_on(tab, answer)
    assert (await tab.until("generation.error"))["code"] == "not_found"
    assert len(backend.requests) == 1


async def test_the_limit_is_of_the_chat_and_holds_for_answers_begun_later(tabs, backend, bob):
    tab = await tabs.open(bob)
    assert (await tab.answered("One"))["finish_reason"] == "stop"
    assert backend.requests[-1].options.max_tokens == 2048
    chat_settings_apply({"chat_max_tokens": 16})
    await tab.answered("Two")
    assert backend.requests[-1].options.max_tokens == 16
