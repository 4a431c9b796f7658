"""Limits on what runs at a time are counted from the engine; past them a rule waits or refuses."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest
from channels.db import database_sync_to_async
from django.utils import timezone

from appliance.errors import ContextLengthExceeded, EngineUnavailable, QuotaExceeded, RateLimited
from appliance.quotas.models import QuotaReservation, UsageRecord
from appliance.quotas.selectors import quota_status
from appliance.serving import turns
from appliance.serving.booking import bookings_wait
from appliance.serving.gateway import gateway_close
from appliance.serving.services import generation_open
from appliance.serving.turns import num_waiting
from tests.appliance.limits import only_limit

pytestmark = pytest.mark.django_db(transaction=True)

PROMPT_TOKENS = 6
DEADLINE_S = 20


async def limit(*args, **subject):
    await database_sync_to_async(only_limit)(*args, **subject)


async def until(is_so):
    async with asyncio.timeout(DEADLINE_S):
        while not is_so():
            await asyncio.sleep(0)


async def read(generation):
    return [event async for event in generation]


@pytest.fixture(autouse=True)
async def nothing_stays_held(backend):
    yield
    assert await bookings_wait(DEADLINE_S) == 0
    assert not turns._lines


async def test_past_requests_at_a_time_a_rule_refuses_b10(backend, ask, bob):
    await limit("concurrent_requests", 2, user=bob)
    backend.hold(after=1)
    first, second = await generation_open(ask()), await generation_open(ask())
    with pytest.raises(RateLimited, match=r"2 requests at a time .rule for bob. is reached") as e:
        await generation_open(ask())
    assert e.value.retry_after_s >= 1
    await first.aclose()
    third = await generation_open(ask())
    await second.aclose()
    await third.aclose()
    assert await bookings_wait(DEADLINE_S) == 0
    assert (await database_sync_to_async(quota_status)(bob)).reserved_tokens == 0


async def test_the_count_is_the_engines_and_cannot_leak(backend, ask, bob):
    await limit("concurrent_requests", 1)
    held = [await generation_open(ask())]
    # It ended in the engine; nobody has read or closed it yet.
    backend.running.clear()
    held.append(await generation_open(ask()))
    with pytest.raises(RateLimited):
        await generation_open(ask())
    for generation in held:
        await generation.aclose()


async def test_a_share_of_the_slots_is_a_number_of_requests(backend, ask):
    await limit("slot_share", 60)
    backend.settings["slots"] = 4
    first, second = await generation_open(ask()), await generation_open(ask())
    with pytest.raises(RateLimited, match=r"60 % of the slots .rule for everybody., 2 now"):
        await generation_open(ask())
    backend.settings["slots"] = 5
    third = await generation_open(ask())
    for generation in (first, second, third):
        await generation.aclose()
    # However few there are: one at least.
    backend.settings["slots"] = 1
    await (await generation_open(ask())).aclose()


async def test_a_limit_of_none_says_so(backend, ask, bob):
    await limit("concurrent_requests", 0, user=bob, wait_s=30)
    with pytest.raises(QuotaExceeded, match="no request at all"):
        await generation_open(ask())


async def test_where_a_rule_waits_they_go_in_order_with_their_places(backend, ask):
    await limit("concurrent_requests", 1, wait_s=60)
    first = await generation_open(ask("first"))
    places = {}

    def waiter(name):
        said = places.setdefault(name, [])
        request = ask(name)
        return asyncio.ensure_future(
            generation_open(request, told=lambda event: said.append(event.ahead))
        )

    subject = f"user:{ask().caller.user_id}"
    waiters = []
    for number, name in enumerate(("second", "third", "fourth")):
        waiters.append(waiter(name))
        await until(lambda number=number: num_waiting(subject) == number + 1)
    await until(lambda: places == {"second": [0], "third": [1], "fourth": [2]})
    for place, opening in enumerate(waiters, start=2):
        await first.aclose()
        first = await opening
        assert len(backend.requests) == place
    await first.aclose()
    assert places == {"second": [0], "third": [1, 0], "fourth": [2, 1, 0]}
    asked = [request.messages[0]["content"] for request in backend.requests]
    assert asked == ["first", "second", "third", "fourth"]


async def test_waiting_is_bounded(backend, ask, monkeypatch):
    passed_s = 0.0
    await limit("concurrent_requests", 1, wait_s=1)
    monkeypatch.setattr(turns, "_clock", lambda: passed_s)
    first = await generation_open(ask())
    subject = f"user:{ask().caller.user_id}"
    waiters = []
    for number in (1, 2):
        waiters.append(asyncio.ensure_future(generation_open(ask())))
        await until(lambda number=number: num_waiting(subject) == number)
    passed_s = 2.0
    done = await asyncio.gather(*waiters, return_exceptions=True)
    assert [type(each) for each in done] == [RateLimited, RateLimited]
    assert all("It waited 1 s for its turn" in each.message for each in done)
    await first.aclose()
    assert await bookings_wait(DEADLINE_S) == 0
    assert not await database_sync_to_async(QuotaReservation.objects.exists)()


async def test_one_who_leaves_the_line_holds_nothing_c09(backend, ask, bob):
    await limit("concurrent_requests", 1, wait_s=60)
    first = await generation_open(ask())
    opening = asyncio.ensure_future(generation_open(ask()))
    await until(lambda: num_waiting(f"user:{bob.pk}") == 1)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await until(lambda: num_waiting(f"user:{bob.pk}") == 0)
    await first.aclose()
    assert await bookings_wait(DEADLINE_S) == 0
    assert len(backend.requests) == 1
    assert not await database_sync_to_async(QuotaReservation.objects.exists)()


async def test_a_server_that_stops_lets_the_line_go_d08(backend, ask, bob):
    await limit("concurrent_requests", 1, wait_s=60)
    first = await generation_open(ask())
    opening = asyncio.ensure_future(generation_open(ask()))
    await until(lambda: num_waiting(f"user:{bob.pk}") == 1)
    gateway_close()
    with pytest.raises(EngineUnavailable):
        await opening
    await first.aclose()


async def test_a_flood_is_no_line(backend, ask, bob, monkeypatch):
    monkeypatch.setattr(turns, "MOST_IN_LINE", 1)
    await limit("concurrent_requests", 1, wait_s=60)
    first = await generation_open(ask())
    opening = asyncio.ensure_future(generation_open(ask()))
    await until(lambda: num_waiting(f"user:{bob.pk}") == 1)
    with pytest.raises(RateLimited):
        await generation_open(ask())
    await first.aclose()
    await (await opening).aclose()


async def test_a_key_is_counted_for_itself(backend, ask, bob):
    from appliance.api_keys.services import api_key_issue

    key, _ = await database_sync_to_async(api_key_issue)(bob, "script")
    await limit("concurrent_requests", 1, key=key)
    with_key = ask()
    with_key = replace(with_key, caller=replace(with_key.caller, key_id=key.pk))
    first, chat = await generation_open(with_key), await generation_open(ask())
    with pytest.raises(RateLimited, match="the key “script”"):
        await generation_open(with_key)
    await first.aclose()
    await chat.aclose()


async def test_a_minute_that_is_used_up_is_waited_for(backend, ask, bob, monkeypatch):
    await limit("requests_per_minute", 1, wait_s=90)
    now = timezone.now().replace(second=59, microsecond=0)
    monkeypatch.setattr(timezone, "now", lambda: now)
    await (await generation_open(ask())).aclose()
    places = []
    opening = asyncio.ensure_future(generation_open(ask(), told=places.append))
    await until(lambda: places)
    assert num_waiting(f"user:{bob.pk}") == 1
    now += timedelta(seconds=2)
    turns.turns_changed()
    await (await asyncio.wait_for(opening, DEADLINE_S)).aclose()
    assert places[0].ahead == 0


async def test_a_longest_request_cuts_the_answer_or_refuses_the_prompt(backend, ask):
    await limit("context_tokens", PROMPT_TOKENS + 20)
    generation = await generation_open(ask(max_tokens=500))
    assert generation.max_completion_tokens == 20
    assert backend.requests[0].options.max_tokens == 20
    await generation.aclose()
    await (await generation_open(ask(max_tokens=3))).aclose()
    with pytest.raises(ContextLengthExceeded, match=r"26 tokens in one request .rule for"):
        await generation_open(ask("word " * 20, max_tokens=500))
    with pytest.raises(ContextLengthExceeded):
        await generation_open(ask(max_tokens=500, min_tokens=21))


async def test_one_that_is_withdrawn_leaves_no_row(backend, ask, bob):
    generation = await generation_open(ask())
    generation.withdraw()
    await generation.aclose()
    assert await bookings_wait(DEADLINE_S) == 0
    assert not await database_sync_to_async(UsageRecord.objects.exists)()
    assert not backend.running
    status = await database_sync_to_async(quota_status)(bob)
    assert (status.used_tokens, status.reserved_tokens) == (0, 0)


async def test_one_that_is_withdrawn_after_words_is_booked(backend, ask):
    backend.hold(after=2)
    generation = await generation_open(ask())
    reading = asyncio.ensure_future(read(generation))
    await asyncio.wait_for(backend.holding.wait(), DEADLINE_S)
    generation.withdraw()
    backend.release()
    await reading
    assert await bookings_wait(DEADLINE_S) == 0
    assert (await database_sync_to_async(UsageRecord.objects.get)()).completion_tokens == 2
