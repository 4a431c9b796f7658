"""Streams that wait, fail, are left or lose their key."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest

from appliance.accounts.models import User
from appliance.api import reply, sse
from appliance.api_keys.models import ApiKey
from appliance.api_keys.services import api_key_revoke
from appliance.quotas.models import UsageRecord
from appliance.quotas.selectors import quota_status
from appliance.serving.booking import bookings_wait, in_db_thread
from appliance.serving.gateway import gateway_close
from appliance.serving.types import Delta, Finished, GenerationEvent
from tests.appliance.api.asgi_caller import DEADLINE_S, Caller
from tests.appliance.api.checks import check_error
from tests.appliance.fake_backend import FakeBackend, FakeStream


async def ledger() -> UsageRecord:
    assert await bookings_wait(DEADLINE_S) == 0
    return await in_db_thread(UsageRecord.objects.get)


async def test_b08_a_failure_after_the_start_is_an_error_frame_and_no_done(
    caller: Caller, backend: FakeBackend
) -> None:
    backend.fail_after = 3
    answer = await caller.chat(stream=True, stream_options={"include_usage": True})
    assert answer.status == 200
    *frames, last = await answer.events()
    assert last["error"]["code"] == "generation_failed"
    assert last["error"]["type"] == "server_error"
    text = "".join(f["choices"][0]["delta"].get("content", "") for f in frames)
    assert text == "Paris is the"
    assert [f["choices"][0]["finish_reason"] for f in frames] == [None] * len(frames)
    row = await ledger()
    assert (row.end, row.completion_tokens) == ("error", 3)


async def test_b08_the_same_failure_of_a_whole_answer_is_500(
    caller: Caller, backend: FakeBackend
) -> None:
    backend.fail_after = 3
    answer = await caller.chat()
    body = await answer.json()
    assert (answer.status, body["error"]["code"]) == (500, "generation_failed")


async def test_a23_what_shows_late_to_ask_for_too_much_is_the_callers_error(
    caller: Caller, backend: FakeBackend
) -> None:
    backend.fail_after, backend.fail_code = 3, "invalid_request"
    await check_error(await caller.chat(), 400, "invalid_request")
    *_, last = await (await caller.chat(stream=True)).events()
    assert (last["error"]["code"], last["error"]["type"]) == (
        "invalid_request",
        "invalid_request_error",
    )


async def test_d08_what_waits_at_a_stop_is_503_and_costs_nothing(
    caller: Caller, backend: FakeBackend, bob: User, caplog: pytest.LogCaptureFixture
) -> None:
    backend.queued_ahead = 1
    backend.refuse_waiting = True
    for n in (1, 2):
        answer = await caller.chat(n=n)
        await check_error(answer, 503, "engine_unavailable")
        assert int(answer.headers["retry-after"]) >= 1
    assert "django.request" not in {record.name for record in caplog.records}
    assert await bookings_wait(DEADLINE_S) == 0
    rows = await in_db_thread(list, UsageRecord.objects.all())
    assert [(row.prompt_tokens, row.completion_tokens) for row in rows] == [(0, 0)] * 3
    assert (await in_db_thread(quota_status, bob)).used_tokens == 0


async def test_d08_a_stream_that_waits_at_a_stop_ends_with_the_same_code(
    caller: Caller, backend: FakeBackend
) -> None:
    backend.queued_ahead = 1
    backend.refuse_waiting = True
    *_, last = await (await caller.chat(stream=True)).events()
    assert last["error"]["code"] == "engine_unavailable"
    assert (await ledger()).prompt_tokens == 0


async def test_one_failing_choice_ends_all_of_them(caller: Caller, backend: FakeBackend) -> None:
    backend.fail_after = 2
    *_, last = await (await caller.chat(stream=True, n=3)).events()
    assert last["error"]["code"] == "generation_failed"
    assert backend.running == {}


async def test_b08_a_broken_back_end_is_told_in_generic_words(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def break_down(self: FakeStream) -> AsyncIterator[GenerationEvent]:
        yield Delta("Par", 1)
        raise RuntimeError("secret detail")

    monkeypatch.setattr(FakeStream, "events", break_down)
    *_, last = await (await caller.chat(stream=True)).events()
    assert last["error"]["code"] == "generation_failed"
    assert "secret" not in str(last)


async def test_an_answer_stopped_on_the_server_is_not_called_finished(
    caller: Caller, backend: FakeBackend
) -> None:
    backend.hold(after=1)
    answer = await caller.chat(stream=True)
    await asyncio.wait_for(backend.holding.wait(), DEADLINE_S)
    backend.abort("r-1")
    backend.release()
    *frames, last = await answer.events()
    assert last["error"]["code"] == "engine_unavailable"
    assert not any(frame["choices"][0]["finish_reason"] for frame in frames)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_slot_and_pays_what_it_got(
    caller: Caller, backend: FakeBackend, bob: User, stream: bool
) -> None:
    backend.hold(after=2)
    body = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "Hello there"}],
        "stream": stream,
        "n": 2,
    }
    answer = caller.send("POST", "/v1/chat/completions", body)
    await asyncio.wait_for(backend.holding.wait(), DEADLINE_S)
    await answer.leave()
    assert backend.running == {}
    assert await bookings_wait(DEADLINE_S) == 0
    rows = await in_db_thread(list, UsageRecord.objects.all())
    assert {row.end for row in rows} == {"abort"}
    status = await in_db_thread(quota_status, bob)
    assert status.reserved_tokens == 0
    assert status.used_tokens == sum(row.prompt_tokens + row.completion_tokens for row in rows)


async def test_a_client_that_leaves_before_the_first_frame_frees_its_slot(
    caller: Caller, backend: FakeBackend
) -> None:
    backend.queued_ahead = 3
    backend.hold(after=0)
    answer = await caller.chat(stream=True)
    await asyncio.wait_for(backend.holding.wait(), DEADLINE_S)
    await answer.leave()
    assert backend.running == {}


async def test_b14_while_nothing_is_sent_comments_keep_the_connection_open(
    caller: Caller, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.02)
    backend.queued_ahead = 3
    backend.hold(after=0)
    answer = await caller.chat(stream=True)
    assert (await answer.event())["choices"][0]["delta"] == {"role": "assistant"}
    assert await answer.event() == ": waiting, 3 ahead"
    for _ in range(3):
        assert await answer.event() == ": keep-alive"
    backend.release()
    rest = await answer.events()
    texts = [frame for frame in rest if isinstance(frame, dict)]
    assert texts[-1]["choices"][0]["finish_reason"] == "stop"
    assert b"\nid:" not in answer.body
    assert b"event:" not in answer.body
    assert rest[-1] == "[DONE]"


async def test_no_comments_while_text_flows(caller: Caller, backend: FakeBackend) -> None:
    answer = await caller.chat(stream=True)
    assert ": keep-alive" not in await answer.events()


async def test_b08_revoking_a_key_ends_its_open_streams(
    caller: Caller, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply, "KEY_CHECK_S", 0.02)
    monkeypatch.setattr(sse, "KEY_CHECK_S", 0.02)
    backend.hold(after=1)
    answer = await caller.chat(stream=True)
    await asyncio.wait_for(backend.holding.wait(), DEADLINE_S)
    await in_db_thread(api_key_revoke, await in_db_thread(ApiKey.objects.get))
    *_, last = await answer.events()
    assert last["error"]["code"] == "invalid_api_key"
    assert backend.running == {}
    assert (await ledger()).end == "abort"


async def test_a_running_answer_does_not_ask_the_database_for_every_token(
    caller: Caller, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(reply, "api_key_is_live", lambda key_id: asked.append(key_id) or True)
    backend.words = ["word "] * 500
    await (await caller.chat(stream=True)).events()
    assert asked == []


async def test_cached_prompt_tokens_are_told(
    caller: Caller, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FakeStream.events

    async def cached(self: FakeStream) -> AsyncIterator[GenerationEvent]:
        async for event in real(self):
            is_end = isinstance(event, Finished)
            yield dataclasses.replace(event, cached_tokens=4) if is_end else event

    monkeypatch.setattr(FakeStream, "events", cached)
    body = await (await caller.chat()).json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


@pytest.mark.parametrize("stream", [True, False])
async def test_b08_an_answer_that_the_servers_end_cuts_off_may_be_asked_for_again(
    caller: Caller, backend: FakeBackend, stream: bool
) -> None:
    backend.hold(after=2)
    sent = caller.send(
        "POST",
        "/v1/chat/completions",
        {
            "model": "scripted",
            "messages": [{"role": "user", "content": "Hello"}],
            "stream": stream,
        },
    )
    await backend.holding.wait()
    gateway_close()
    backend.fail_after = 2
    backend.release()
    answer = await (await sent.start()).ended()
    assert b'"code":"engine_unavailable"' in answer.body
    assert b"[DONE]" not in answer.body
    assert answer.status == (200 if stream else 503)
    assert ("retry-after" in answer.headers) is not stream
