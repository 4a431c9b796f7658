"""The load generator against a real socket: counts, order and ends; no figure of speed."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from appliance.capacity.figures import level_of
from appliance.capacity.load import (
    HOPELESS_FAILURES,
    Load,
    LoadFailed,
    Target,
    base_url,
    first_model,
    run_level,
    session,
    warm_up,
)
from appliance.capacity.mix import CHAT, DOCUMENTS, PRESETS, made_up
from appliance.errors import BadRequest
from tests.appliance.capacity.scripted_openai import ScriptedServer, scripted_server

LONG_S = 120.0


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as server:
        yield server


async def loaded(
    server: ScriptedServer, users: int, requests: int, level_s: float = LONG_S
) -> Load:
    load, target = Load(users), Target(server.url, "secret", "scripted")
    async with session(target) as client:
        await run_level(client, target, CHAT, load, level_s=level_s, max_requests=requests)
    return load


async def test_every_request_is_sent_once_with_the_key_and_the_lengths(
    server: ScriptedServer,
) -> None:
    load = await loaded(server, users=3, requests=10)
    assert sorted(answer.number for answer in load.answers) == list(range(10))
    assert server.keys == ["Bearer secret"] * 10
    sent = sorted((body["messages"][0]["content"], body["max_tokens"]) for body in server.bodies)
    wanted = sorted((one.text, one.answer_tokens) for one in (made_up(CHAT, i) for i in range(10)))
    assert sent == wanted
    assert all(body["ignore_eos"] and body["stream"] for body in server.bodies)


async def test_exactly_so_many_run_at_the_same_time(server: ScriptedServer) -> None:
    server.hold()
    running = asyncio.ensure_future(loaded(server, users=4, requests=9))
    await server.until_active(4)
    assert len(server.bodies) == 4, "a user sent its next request before the answer ended"
    server.release()
    load = await running
    assert server.most_active == 4
    assert len(load.answers) == 9


async def test_figures_come_from_what_was_received(server: ScriptedServer) -> None:
    load = await loaded(server, users=2, requests=4)
    level = level_of(load, 2.0)
    assert (level.requests, level.errors) == (4, 0)
    # The server says 6 tokens for 3 deltas: its own count goes before the number of deltas.
    assert level.completion_tokens == 24
    assert level.tokens_per_s == pytest.approx(12.0)
    assert level.user_tokens_per_s == pytest.approx(6.0)
    assert level.ttft_p50_s is not None
    assert level.ttft_p95_s is not None
    assert 0 < level.ttft_p50_s <= level.ttft_p95_s
    for answer in load.answers:
        assert answer.stamps_s == sorted(answer.stamps_s)
        assert answer.sent_s <= answer.stamps_s[0]


async def test_failures_are_rows_not_crashes(server: ScriptedServer) -> None:
    server.refuse = 3
    level = level_of(await loaded(server, users=1, requests=6), 1.0)
    assert (level.requests, level.errors) == (6, 3)
    assert level.first_error == "HTTP 503: the queue is full"


async def test_a_server_that_refuses_everything_is_left_alone_soon(server: ScriptedServer) -> None:
    server.refuse = 1000
    with pytest.raises(LoadFailed, match="the queue is full"):
        await loaded(server, users=2, requests=500)
    assert len(server.bodies) <= HOPELESS_FAILURES + 2


async def test_the_end_of_the_time_cuts_answers_that_have_begun(server: ScriptedServer) -> None:
    server.words = ["word"] * 200_000
    load = await loaded(server, users=2, requests=100, level_s=0.3)
    assert len(load.answers) == 2
    assert all(answer.is_cut and not answer.error for answer in load.answers)
    assert level_of(load, 0.3).errors == 0


async def test_cancelling_closes_every_connection(server: ScriptedServer) -> None:
    server.hold()
    running = asyncio.ensure_future(loaded(server, users=5, requests=50))
    await server.until_active(5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await server.until_active(0)
    assert server.left_early == 5


async def test_while_the_gate_is_closed_nothing_is_sent_and_no_time_counts(
    server: ScriptedServer,
) -> None:
    opened, asked = asyncio.Event(), asyncio.Event()

    async def gate() -> None:
        asked.set()
        await opened.wait()

    load, target = Load(2), Target(server.url, "", "scripted")
    async with session(target) as client:
        run = asyncio.ensure_future(
            run_level(client, target, CHAT, load, level_s=LONG_S, max_requests=4, gate=gate)
        )
        await asked.wait()
        await asyncio.sleep(0)
        assert server.bodies == []
        opened.set()
        await run
    assert len(load.answers) == 4
    assert load.held_s > 0


async def test_the_warm_up_learns_how_long_words_are(server: ScriptedServer) -> None:
    assert await warm_up(Target(server.url, "", "scripted"), DOCUMENTS) == pytest.approx(2.0)
    assert await first_model(Target(server.url)) == "scripted"


async def test_a_server_that_is_not_there_is_said_in_words() -> None:
    with pytest.raises(LoadFailed, match="cannot be reached"):
        await first_model(Target("http://127.0.0.1:9/v1"))


def test_the_same_number_makes_the_same_request_and_others_begin_differently() -> None:
    for mix in PRESETS.values():
        assert made_up(mix, 7) == made_up(mix, 7)
        begins = {made_up(mix, i).text.split()[0] for i in range(200)}
        assert len(begins) > 190
        assert {made_up(mix, i).answer_tokens for i in range(200)} == {a for _, a in mix.lengths}


def test_requests_fit_the_context() -> None:
    for i in range(50):
        one = made_up(DOCUMENTS, i, context_tokens=512, tokens_per_word=6.0)
        assert len(one.text.split()) * 6.0 + one.answer_tokens < 512


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8000", "file:///etc/passwd", "ftp://host/v1", "http://", "http://h:99999"],
)
def test_only_http_addresses_are_taken(url: str) -> None:
    with pytest.raises(BadRequest, match="http:// or https://"):
        base_url(url)


def test_an_address_is_completed() -> None:
    assert base_url("http://host:8000") == "http://host:8000/v1"
    assert base_url("https://host/api/v1/?a=b#c") == "https://host/api/v1"
