"""The console's socket: who may open it, what it tells, and what it takes from a browser."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from asgiref.sync import sync_to_async
from django.contrib.sessions.models import Session

from appliance.accounts.models import User
from appliance.console import consumers, protocol
from appliance.console.feed import ConsoleFeed
from appliance.console.picture import NEVER
from appliance.serving.gateway import gateway_remove, gateway_serving
from tests.appliance.console.map_reader import engine_cells
from tests.appliance.console.page import WAIT_S, Page, sign_in, socket_for
from tests.appliance.console.simulated_backend import SimulatedBackend

OpenPage = Callable[..., Awaitable[Page]]


@pytest.fixture
async def open_page(feed: ConsoleFeed, alice: User) -> AsyncIterator[OpenPage]:
    pages: list[Page] = []

    async def open_one(user: User = alice) -> Page:
        pages.append(await Page.open(user))
        return pages[-1]

    yield open_one
    for page in pages:
        await page.socket.disconnect()


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_true():
            await asyncio.sleep(0)


# ---- who may open it


async def test_a_visitor_is_refused_before_the_socket_is_accepted(engine: SimulatedBackend) -> None:
    connected, code = await socket_for(None).connect(timeout=WAIT_S)
    assert (connected, code) == (False, protocol.CLOSE_NOT_SIGNED_IN)


async def test_a_member_is_refused_before_the_socket_is_accepted(
    engine: SimulatedBackend, bob: User
) -> None:
    client = await sync_to_async(sign_in)(bob)
    connected, code = await socket_for(client).connect(timeout=WAIT_S)
    assert (connected, code) == (False, protocol.CLOSE_NOT_ADMIN)


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://localhost.evil.example", "null", "", None]
)
async def test_c01_an_admins_cookie_from_another_origin_is_refused(
    engine: SimulatedBackend, alice: User, origin: str | None
) -> None:
    client = await sync_to_async(sign_in)(alice)
    connected, _code = await socket_for(client, origin).connect(timeout=WAIT_S)
    assert not connected


async def test_a_socket_ends_when_its_session_does(
    open_page: OpenPage, alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "RECHECK_S", 0.0)
    page = await open_page()
    await page.update()
    await Session.objects.all().adelete()
    assert await _close_code(page) == protocol.CLOSE_NOT_SIGNED_IN


async def test_a_socket_ends_when_its_user_is_no_admin_any_more(
    open_page: OpenPage, alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "RECHECK_S", 0.0)
    page = await open_page()
    await page.update()
    await User.objects.filter(pk=alice.pk).aupdate(is_staff=False, is_superuser=False)
    assert await _close_code(page) == protocol.CLOSE_NOT_ADMIN


async def _close_code(page: Page) -> int:
    async with asyncio.timeout(WAIT_S):
        while True:
            output = await page.socket.receive_output(timeout=WAIT_S)
            if output["type"] == "websocket.close":
                return int(output["code"])
            await page.send("console.ack", n=json.loads(output["text"])["n"])


# ---- what it tells


async def test_the_first_message_is_everything_and_deltas_keep_up_with_the_engine(
    open_page: OpenPage, engine: SimulatedBackend
) -> None:
    page = await open_page()
    first = await page.update()
    assert first["base"] == -1
    for _ in range(12):
        engine.advance(1.5)
        await page.update_after(page.tick + 1)
        assert page.map.cells(page.names()) == engine_cells(engine.block_map())
        assert page.live_ids() == {info["request_id"] for info in engine.state()["requests"]}
        kv = page.state["kv"]
        held = sum(code >= 0 for code in page.map.codes)
        assert (held, page.map.codes.count(-2)) == (kv["blocks_used"], kv["blocks_cached"])
    assert any(row["ended"] is not None for row in page.rows.values())


async def test_d01_a_slow_page_gets_fewer_merged_updates_and_loses_nothing(
    open_page: OpenPage, engine: SimulatedBackend, feed: ConsoleFeed
) -> None:
    slow, quick = await open_page(), await open_page()
    for _ in range(protocol.MAX_UNACKNOWLEDGED):
        last = await slow.update(acknowledge=False)
    for _ in range(20):
        engine.advance(1.0)
        await quick.update_after(feed.picture.tick)
    assert await slow.socket.receive_nothing(timeout=0.05)
    await slow.send("console.ack", n=last["n"])
    await slow.update_after(quick.tick)
    assert slow.map.cells(slow.names()) == engine_cells(engine.block_map())
    assert slow.live_ids() == quick.live_ids()
    assert len(slow.sizes) < len(quick.sizes)


async def test_twenty_consoles_share_one_look_and_the_last_one_ends_the_map_reading(
    open_page: OpenPage,
    engine: SimulatedBackend,
    feed: ConsoleFeed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0
    read_map = engine.block_map

    def counted() -> object:
        nonlocal looks
        looks += 1
        return read_map()

    monkeypatch.setattr(engine, "block_map", counted)
    pages = [await open_page() for _ in range(20)]
    for page in pages:
        await page.update()
    tick, before = feed.picture.tick, looks
    for page in pages:
        await page.update_after(tick + 5)
    assert looks - before <= feed.picture.tick - tick
    for page in pages:
        await page.socket.disconnect()
    await until(lambda: feed.num_watching == 0)
    await feed.newer_than(feed.picture.tick)
    after = looks
    await feed.newer_than(feed.picture.tick + 3)
    assert looks == after


async def test_a_paused_page_gets_nothing_and_goes_on_where_it_was(
    open_page: OpenPage, engine: SimulatedBackend, feed: ConsoleFeed
) -> None:
    page = await open_page()
    await page.update()
    await page.send("console.pause")
    await until(lambda: feed.num_watching == 0)
    while not await page.socket.receive_nothing(timeout=0.03):
        await page.update()
    engine.advance(10)
    await feed.newer_than(feed.picture.tick + 2)
    assert await page.socket.receive_nothing(timeout=0.03)
    await page.send("console.resume")
    resumed = await page.update()
    assert resumed["base"] != -1
    assert page.map.cells(page.names()) == engine_cells(engine.block_map())


async def test_resync_sends_everything_again(open_page: OpenPage) -> None:
    page = await open_page()
    await page.update()
    await page.send("console.resync")
    async with asyncio.timeout(WAIT_S):
        while (await page.update())["base"] != -1:
            pass


async def test_a_page_opened_later_has_the_last_minutes(
    open_page: OpenPage, engine: SimulatedBackend, feed: ConsoleFeed
) -> None:
    for _ in range(8):
        engine.advance(2)
        await feed.look()
    page = await open_page()
    await page.update()
    ended = [row for row in page.rows.values() if row["ended"] is not None]
    assert ended
    assert all(row["segments"] for row in ended)
    assert page.samples >= 1


async def test_without_an_engine_the_page_is_told_why(
    open_page: OpenPage, engine: SimulatedBackend
) -> None:
    gateway_remove()
    page = await open_page()
    await page.update()
    assert page.state["state"] == "unavailable"
    assert "serve" in page.state["error"]


async def test_a_look_that_fails_ends_no_console(
    open_page: OpenPage, engine: SimulatedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = await open_page()
    await page.update()
    real = engine.state

    def broken() -> object:
        monkeypatch.setattr(engine, "state", real)
        raise RuntimeError("the engine cannot be read")

    monkeypatch.setattr(engine, "state", broken)
    await page.update_after(page.tick + 3)
    assert page.state["state"] == "ready"


# ---- what it takes from a browser


BAD_TEXTS = [
    "{", "[]", "5", "null", '"x"', "", "{}", '{"type":1}', '{"type":"nonsense"}',
    '{"type":"console.ack"}', '{"type":"console.ack","n":"1"}', '{"type":"console.ack","n":true}',
    '{"type":"console.ack","n":-1}', '{"type":"console.pause","n":1}',
    '{"type":["console.pause"]}', "[" * 400 + "]" * 400, '{"type":"console.ack","n":1e99}',
]  # fmt: skip


@pytest.mark.parametrize("text", BAD_TEXTS)
async def test_c03_a_message_that_cannot_be_read_is_answered_and_the_stream_goes_on(
    open_page: OpenPage, text: str
) -> None:
    page = await open_page()
    await page.update()
    await page.socket.send_input({"type": "websocket.receive", "text": text})
    async with asyncio.timeout(WAIT_S):
        while True:
            message = json.loads(await page.socket.receive_from(timeout=WAIT_S))
            if message["type"] == "console.error":
                break
            await page.send("console.ack", n=message["n"])
    assert message["code"] == "invalid_request"
    page.tick = -1
    await page.send("console.resync")
    async with asyncio.timeout(WAIT_S):
        while True:
            message = json.loads(await page.socket.receive_from(timeout=WAIT_S))
            await page.send("console.ack", n=message["n"])
            if message["base"] == -1:
                break


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ({"bytes_data": b"\x00\xff"}, protocol.CLOSE_BAD_DATA),
        ({"text_data": "x" * 5_000_000}, protocol.CLOSE_TOO_BIG),
    ],
)
async def test_c03_binary_and_huge_frames_close_the_socket(
    open_page: OpenPage, frame: dict[str, object], code: int
) -> None:
    page = await open_page()
    await page.update()
    await page.socket.send_to(**frame)
    assert await _close_code(page) == code


async def test_c03_a_flood_closes_the_socket(open_page: OpenPage) -> None:
    page = await open_page()
    for _ in range(protocol.MAX_MESSAGES_A_SECOND + 1):
        await page.socket.send_to(text_data="{")
    async with asyncio.timeout(WAIT_S):
        while True:
            output = await page.socket.receive_output(timeout=WAIT_S)
            if output["type"] == "websocket.close":
                break
    assert output["code"] == protocol.CLOSE_TOO_MANY_MESSAGES


async def test_acknowledging_what_was_never_sent_opens_no_flood(
    open_page: OpenPage, feed: ConsoleFeed
) -> None:
    page = await open_page()
    await page.update(acknowledge=False)
    await page.send("console.ack", n=10**15)
    await feed.newer_than(feed.picture.tick + 8)
    num_updates = 1
    while not await page.socket.receive_nothing(timeout=0.03):
        await page.update(acknowledge=False)
        num_updates += 1
    # The one message acknowledged all that was sent until then, and nothing after it.
    assert num_updates <= 2 * protocol.MAX_UNACKNOWLEDGED


# ---- the history


async def test_the_history_begins_with_the_server_not_with_the_first_page(
    engine: SimulatedBackend, feed: ConsoleFeed
) -> None:
    gateway_serving()
    await feed.newer_than(feed.picture.tick + 2)
    assert feed.picture.delta_since(NEVER)["samples"]
