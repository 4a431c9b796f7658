"""Every generation is paid for once, with what it really took, however it ends."""

import asyncio
import gc

import pytest
from channels.db import database_sync_to_async
from django.db import OperationalError

from appliance.errors import BadRequest, ContextLengthExceeded, EngineUnavailable, QuotaExceeded
from appliance.quotas.models import QuotaReservation, UsageRecord
from appliance.quotas.selectors import quota_status
from appliance.quotas.services import quota_settle
from appliance.serving import booking, services
from appliance.serving.booking import bookings_wait
from appliance.serving.gateway import gateway_close, gateway_remove, get_backend
from appliance.serving.services import generation_open
from appliance.serving.types import Delta, Finished, Queued
from tests.appliance.limits import tokens_a_day

pytestmark = pytest.mark.django_db(transaction=True)

PROMPT_TOKENS = 6


@database_sync_to_async
def ledger():
    return list(UsageRecord.objects.order_by("pk"))


@database_sync_to_async
def status_of(user):
    return quota_status(user)


async def only_record(user):
    """The one ledger row, after checking that nothing stays held."""
    assert await bookings_wait(10) == 0
    (record,) = await ledger()
    status = await status_of(user)
    assert status.reserved_tokens == 0
    assert status.used_tokens == record.prompt_tokens + record.completion_tokens
    return record


async def test_a_finished_answer_is_booked_with_its_true_counts(backend, ask, bob):
    generation = await generation_open(ask(max_tokens=50))
    assert generation.prompt_tokens == PROMPT_TOKENS
    assert generation.max_completion_tokens == 50
    assert (await status_of(bob)).reserved_tokens == PROMPT_TOKENS + 50
    events = [event async for event in generation]
    assert "".join(e.text for e in events if isinstance(e, Delta)) == "Paris is the capital."
    assert isinstance(events[-1], Finished)
    record = await only_record(bob)
    assert (record.prompt_tokens, record.completion_tokens, record.end) == (6, 5, "stop")
    assert (record.source, record.model, record.username) == ("chat", "scripted", "bob")
    assert record.request_id == generation.request_id


async def test_a_failed_answer_costs_what_was_made_b08(backend, ask, bob):
    backend.fail_after = 2
    events = [event async for event in await generation_open(ask())]
    assert events[-1].error
    record = await only_record(bob)
    assert (record.end, record.completion_tokens) == ("error", 2)


async def test_one_that_is_refused_in_the_queue_costs_nothing_d08(backend, ask, bob):
    backend.queued_ahead = 2
    backend.refuse_waiting = True
    events = [event async for event in await generation_open(ask())]
    assert [type(event) for event in events] == [Queued, Finished]
    record = await only_record(bob)
    assert (record.end, record.prompt_tokens, record.completion_tokens) == ("error", 0, 0)
    assert (await status_of(bob)).used_tokens == 0


async def test_stopping_in_the_middle_books_and_frees(backend, ask, bob):
    backend.hold(after=2)
    generation = await generation_open(ask())
    reading = asyncio.ensure_future(read(generation))
    await asyncio.wait_for(backend.holding.wait(), 10)
    await generation.aclose()
    await generation.aclose()
    assert not backend.running
    record = await only_record(bob)
    assert (record.end, record.completion_tokens) == ("abort", 2)
    backend.release()
    await reading
    assert len(await ledger()) == 1


async def read(generation):
    return [event async for event in generation]


async def test_a_reader_that_is_cancelled_books_and_frees(backend, ask, bob):
    backend.hold(after=3)
    reading = asyncio.ensure_future(read(await generation_open(ask())))
    await asyncio.wait_for(backend.holding.wait(), 10)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    record = await only_record(bob)
    assert (record.end, record.completion_tokens) == ("abort", 3)
    assert not backend.running


async def test_cancelling_again_while_it_is_booked_loses_nothing(backend, ask, bob, monkeypatch):
    entered, leave = asyncio.Event(), asyncio.Event()
    real = booking.in_db_thread

    async def slow(work, *args, **kwargs):
        if work is quota_settle:
            entered.set()
            await leave.wait()
        return await real(work, *args, **kwargs)

    monkeypatch.setattr(booking, "in_db_thread", slow)
    backend.hold(after=1)
    reading = asyncio.ensure_future(read(await generation_open(ask())))
    await asyncio.wait_for(backend.holding.wait(), 10)
    reading.cancel()
    await asyncio.wait_for(entered.wait(), 10)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    leave.set()
    assert (await only_record(bob)).completion_tokens == 1


async def test_one_that_is_closed_unread_costs_nothing(backend, ask, bob):
    generation = await generation_open(ask())
    await generation.aclose()
    record = await only_record(bob)
    assert (record.end, record.prompt_tokens, record.completion_tokens) == ("abort", 0, 0)
    assert not backend.running


async def test_one_that_is_forgotten_is_ended_all_the_same(backend, ask, bob):
    await generation_open(ask())
    await asyncio.sleep(0)  # lets the loop forget the future that brought it
    gc.collect()
    await asyncio.sleep(0)
    assert (await only_record(bob)).end == "abort"
    assert not backend.running


async def test_one_whose_reader_breaks_off_is_ended(backend, ask, bob):
    generation = await generation_open(ask())
    events = aiter(generation)
    async for event in events:
        if isinstance(event, Delta):
            break
    await events.aclose()
    assert (await only_record(bob)).completion_tokens == 1


async def test_a_caller_who_leaves_while_opening_holds_nothing_c09(backend, ask, bob, monkeypatch):
    entered, leave = asyncio.Event(), asyncio.Event()
    real = services.in_db_thread

    async def slow(work, *args, **kwargs):
        made = await real(work, *args, **kwargs)
        entered.set()
        await leave.wait()
        return made

    monkeypatch.setattr(services, "in_db_thread", slow)
    opening = asyncio.ensure_future(generation_open(ask()))
    await asyncio.wait_for(entered.wait(), 10)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    leave.set()
    while await database_sync_to_async(QuotaReservation.objects.exists)():
        await bookings_wait(10)
    assert backend.requests == []
    assert await ledger() == []
    assert (await status_of(bob)).used_tokens == 0


async def test_a_refusal_at_the_door_releases_c09(backend, ask, bob, monkeypatch):
    async def refuse(prepared):
        raise EngineUnavailable("Gone.")

    monkeypatch.setattr(backend, "generate", refuse)
    with pytest.raises(EngineUnavailable):
        await generation_open(ask())
    assert await bookings_wait(10) == 0
    assert (await status_of(bob)).reserved_tokens == 0
    assert await ledger() == []


async def test_a_bad_request_reserves_nothing(backend, ask, bob):
    with pytest.raises(ContextLengthExceeded):
        await generation_open(ask("word " * 2000))
    assert (await status_of(bob)).reserved_tokens == 0


async def test_a_spent_quota_queues_nothing(backend, ask, bob):
    await database_sync_to_async(tokens_a_day)(bob, 10)
    with pytest.raises(QuotaExceeded):
        await generation_open(ask())
    assert backend.requests == []


async def test_the_answer_is_cut_to_the_quota_that_is_left(backend, ask, bob):
    await database_sync_to_async(tokens_a_day)(bob, PROMPT_TOKENS + 20)
    generation = await generation_open(ask(max_tokens=500))
    assert generation.max_completion_tokens == 20
    assert backend.requests[0].options.max_tokens == 20
    await generation.aclose()


async def test_min_tokens_is_not_cut_below(backend, ask, bob):
    await database_sync_to_async(tokens_a_day)(bob, PROMPT_TOKENS + 20)
    with pytest.raises(QuotaExceeded):
        await generation_open(ask(max_tokens=500, min_tokens=30))


async def test_fifty_at_once_get_no_more_than_the_quota_c09(backend, ask, bob):
    await database_sync_to_async(tokens_a_day)(bob, 3 * (PROMPT_TOKENS + 100))
    # No answer ends before all have asked.
    backend.hold(after=0)
    opened = await asyncio.gather(
        *(generation_open(ask(max_tokens=100, min_tokens=100)) for _ in range(50)),
        return_exceptions=True,
    )
    running = [one for one in opened if not isinstance(one, BaseException)]
    refused = [one for one in opened if isinstance(one, QuotaExceeded)]
    assert (len(running), len(refused)) == (3, 47)
    for generation in running:
        await generation.aclose()
    assert await bookings_wait(10) == 0
    assert (await status_of(bob)).reserved_tokens == 0


async def test_a_database_that_is_away_delays_the_booking_only_d03(backend, ask, bob, monkeypatch):
    monkeypatch.setattr(booking, "_RETRY_DELAYS_S", (0.0,))
    real, refused = booking.in_db_thread, []

    async def flaky(work, *args, **kwargs):
        if len(refused) < 3:
            refused.append(work)
            raise OperationalError("database is locked")
        return await real(work, *args, **kwargs)

    monkeypatch.setattr(booking, "in_db_thread", flaky)
    generation = await generation_open(ask())
    events = await read(generation)
    assert isinstance(events[-1], Finished)
    assert (await only_record(bob)).completion_tokens == 5
    assert len(refused) == 3


async def test_a_stopping_server_admits_nothing_new_d08(backend, ask, bob):
    generation = await generation_open(ask())
    gateway_close()
    with pytest.raises(EngineUnavailable) as caught:
        await generation_open(ask())
    assert caught.value.retry_after_s
    assert isinstance((await read(generation))[-1], Finished)
    assert get_backend() is backend


async def test_without_a_back_end_the_message_says_what_to_do(ask):
    gateway_remove()
    with pytest.raises(EngineUnavailable, match=r"manage\.py serve"):
        await generation_open(ask())


async def test_a_prompt_error_of_an_absent_caller_is_no_unhandled_error(backend, ask, monkeypatch):
    entered, leave = asyncio.Event(), asyncio.Event()

    async def prepare(request):
        entered.set()
        await leave.wait()
        raise BadRequest("No.")

    monkeypatch.setattr(backend, "prepare", prepare)
    unhandled = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    opening = asyncio.ensure_future(generation_open(ask()))
    await asyncio.wait_for(entered.wait(), 10)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    leave.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    del opening
    gc.collect()
    assert unhandled == []
