"""Faults of other servers, tried over sockets on the real server with the real model."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server

WAIT_S = 120.0
MODEL = "smollm2-135m-instruct"
CHAT = "/v1/chat/completions"


class Caller:
    """Asks as one user, and looks at the engine as an admin."""

    def __init__(self, server: Server, key: str, other_key: str = "") -> None:
        self.server, self.other_key = server, other_key
        headers = {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(
            base_url=server.url, headers=headers, timeout=WAIT_S, limits=limits
        )

    async def engine(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.http.get("/api/engine")).json()
        return found

    async def until(self, **wanted: int) -> dict[str, Any]:
        """The engine's state, once `running` or `waiting` are as wanted."""
        async with asyncio.timeout(WAIT_S):
            while True:
                state = await self.engine()
                if all(state[name] == value for name, value in wanted.items()):
                    return state
                await asyncio.sleep(0.05)

    @contextlib.asynccontextmanager
    async def tuned(self, **settings: int) -> AsyncIterator[None]:
        """With other settings of the engine; those of before come back."""
        before = (await self.engine())["settings"]
        former = {name: before[name]["requested"] for name in settings}
        assert (await self.http.patch("/api/engine", json=settings)).status_code == 200
        yield
        assert (await self.http.patch("/api/engine", json=former)).status_code == 200

    async def quiet(self) -> dict[str, Any]:
        state = await self.until(running=0, waiting=0)
        kv = state["kv"]
        assert kv["blocks_used"] == 0
        assert kv["blocks_free"] + kv["blocks_cached"] == kv["blocks_total"]
        return state


def body(content: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        **fields,
    }


@contextlib.asynccontextmanager
async def calling(server: Server, api_key: str, other_key: str) -> AsyncIterator[Caller]:
    """The engine is quiet at the end."""
    caller = Caller(server, api_key, other_key)
    yield caller
    await caller.quiet()
    await caller.http.aclose()


@pytest.fixture(scope="module")
def other_key(server: Server) -> str:
    """Of a second user."""
    made = {"USERNAME": "dora", "EMAIL": "dora@team.test", "PASSWORD": "correct-horse-9"}
    added = {f"DJANGO_SUPERUSER_{name}": value for name, value in made.items()}
    server.environment.update(added)
    server.manage("createsuperuser", "--noinput")
    for name in added:
        del server.environment[name]
    return server.manage("create_api_key", "dora", "--name", "tests").strip()


async def a01_clients_that_close_between_a_chunk_and_the_end_leave_nothing(
    caller: Caller,
) -> None:
    draw = random.Random(4)

    async def ask_and_leave(number: int) -> None:
        asked = body(f"Say {number}.", 3, stream=True)
        async with caller.http.stream("POST", CHAT, json=asked) as answer:
            lines = answer.aiter_lines()
            for _ in range(draw.randrange(2, 9)):
                if await anext(lines, None) is None:
                    break

    for first in range(0, 200, 20):
        await asyncio.gather(*map(ask_and_leave, range(first, first + 20)))
    await caller.quiet()
    answer = await caller.http.post(CHAT, json=body("Say one.", 3))
    assert answer.json()["usage"]["completion_tokens"] == 3


async def a03_a_client_that_leaves_an_answer_without_a_stream_stops_it(
    caller: Caller,
) -> None:
    before = (await caller.engine())["totals"]
    asking = asyncio.create_task(caller.http.post(CHAT, json=body("Count.", 1500)))
    await caller.until(running=1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    after = (await caller.quiet())["totals"]
    assert after["requests_aborted"] - before["requests_aborted"] == 1
    assert after["generated_tokens"] - before["generated_tokens"] < 1500


async def a03_prompts_whose_clients_left_the_queue_are_never_computed(caller: Caller) -> None:
    long = "The board has decided. " * 280
    async with caller.tuned(slots=1):
        before = (await caller.engine())["totals"]
        busy = asyncio.create_task(caller.http.post(CHAT, json=body("Count.", 4000)))
        await caller.until(running=1)
        queued = [
            asyncio.create_task(caller.http.post(CHAT, json=body(f"{n}. {long}", 5)))
            for n in range(10)
        ]
        await caller.until(waiting=10)
        for asking in queued:
            asking.cancel()
        await asyncio.gather(*queued, return_exceptions=True)
        await caller.until(waiting=0)
        busy.cancel()
        answer = await caller.http.post(CHAT, json=body("Say one.", 3))
        assert answer.json()["usage"]["completion_tokens"] == 3
        after = await caller.quiet()
    # The two short prompts alone: one of the ten has over a thousand tokens.
    assert after["totals"]["prompt_tokens"] - before["prompt_tokens"] < 200


async def a26_past_the_queues_end_askers_are_sent_away_at_once(caller: Caller) -> None:
    other = Caller(caller.server, caller.other_key)
    async with caller.tuned(slots=2, max_waiting_requests=20):
        flood = [
            asyncio.create_task(
                caller.http.post(CHAT, json=body(f"Count to {n}.", 40, n=4 if n % 10 == 0 else 1))
            )
            for n in range(100)
        ]
        await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
        # The one whose user has asked nothing yet is let in as soon as the queue has room.
        while (answer := await other.http.post(CHAT, json=body("Say one.", 3))).status_code != 200:
            assert answer.status_code in (429, 503)
            await asyncio.sleep(0.05)
        answers = await asyncio.gather(*flood)
    await other.http.aclose()
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(answers) - len(refused) >= 2
    assert len(refused) >= 50, "2 run and 20 wait, however many ask"
    for answer in refused:
        assert answer.status_code in (429, 503)
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["message"]


async def a06_nobody_finds_anothers_prompt_in_the_cache(caller: Caller) -> None:
    private = "The board has decided, and nobody may know. " * 60

    async def cached(who: Caller, text: str, **fields: Any) -> int:
        answer = (await who.http.post(CHAT, json=body(text, 1, **fields))).json()
        assert answer["usage"]["prompt_tokens"] > 500
        found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    await cached(caller, private)
    assert await cached(caller, private) > 500
    other = Caller(caller.server, caller.other_key)
    # At most what the server itself puts in front of everybody's prompt.
    own = await cached(other, "Something else entirely, and long. " * 90)
    assert await cached(other, private, user="alice") == own
    await other.http.aclose()


async def a15_a_seeded_answer_is_the_same_alone_and_beside_others(caller: Caller) -> None:
    seeded = body("Tell a story.", 24, seed=42, temperature=0.8)

    async def text(**fields: Any) -> list[str]:
        answer = (await caller.http.post(CHAT, json={**seeded, **fields})).json()
        return [choice["message"]["content"] for choice in answer["choices"]]

    alone = await text()
    others = [
        asyncio.create_task(caller.http.post(CHAT, json=body(f"Talk of {n}.", 10 * n)))
        for n in (1, 4)
    ]
    assert await text() == alone
    await asyncio.gather(*others)
    assert await text() == alone
    two = await text(n=2)
    assert two[0] != two[1]
    assert await text(n=2) == two
    for seed in (2**63, 2**70):
        refused = await caller.http.post(CHAT, json={**seeded, "seed": seed})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "seed")


Case = Callable[[Caller], Coroutine[Any, Any, None]]
CASES: list[Case] = [
    a01_clients_that_close_between_a_chunk_and_the_end_leave_nothing,
    a03_a_client_that_leaves_an_answer_without_a_stream_stops_it,
    a03_prompts_whose_clients_left_the_queue_are_never_computed,
    a06_nobody_finds_anothers_prompt_in_the_cache,
    a26_past_the_queues_end_askers_are_sent_away_at_once,
    a15_a_seeded_answer_is_the_same_alone_and_beside_others,
]


@pytest.mark.parametrize("case", CASES, ids=[case.__name__ for case in CASES])
def test_case(
    server: Server,
    api_key: str,
    other_key: str,
    case: Callable[[Caller], Coroutine[Any, Any, None]],
) -> None:
    async def play() -> None:
        async with calling(server, api_key, other_key) as caller:
            await case(caller)

    # The browser has the event loop of this thread.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, play()).result()
