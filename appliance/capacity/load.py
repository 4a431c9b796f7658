"""A closed-loop load: N users who each send their next request as soon as the last is answered.

Works against any OpenAI-compatible server. Everything is measured where a client sees it. Bounded
in time and requests; cancelling the task closes every connection, which ends the answers.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from appliance.capacity.mix import TOKENS_PER_WORD, Mix, made_up
from appliance.errors import BadRequest, EngineUnavailable

REQUEST_TIMEOUT_S = 300.0
CONNECT_TIMEOUT_S = 10.0
# A line of a stream is a few hundred bytes; a server that sends more is no such server.
_MAX_LINE_BYTES = 1 << 20
_MAX_ERROR_CHARS = 200
# This many failures without one answer end a level: the server does not take such requests.
HOPELESS_FAILURES = 8
_WARM_UP_LENGTHS = (40, 8)


class LoadFailed(EngineUnavailable):
    """The server cannot be measured: not reachable, or it refuses every request."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server to load. `base_url` ends before `/chat/completions`."""

    base_url: str
    api_key: str = ""
    model: str = ""
    # None where nobody knows.
    context_tokens: int | None = None
    tokens_per_word: float = TOKENS_PER_WORD


@dataclass(slots=True)
class Answer:
    """One request as its client saw it, in seconds since the level began."""

    number: int
    sent_s: float
    stamps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""
    # Ended by the load at the end of the level, after its first token.
    is_cut: bool = False

    @property
    def ttft_s(self) -> float | None:
        return self.stamps_s[0] - self.sent_s if self.stamps_s else None

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.stamps_s, self.stamps_s[1:], strict=False)]

    def tokens_until(self, end_s: float) -> float:
        """Tokens received by `end_s`; a delta may carry several."""
        if not self.stamps_s:
            return 0.0
        tokens = max(self.completion_tokens, len(self.stamps_s))
        return tokens * sum(stamp <= end_s for stamp in self.stamps_s) / len(self.stamps_s)


@dataclass(slots=True)
class Load:
    """The state of one running level; read by whoever reports progress."""

    users: int
    answers: list[Answer] = field(default_factory=list)
    # Those that are being answered now.
    open: list[Answer] = field(default_factory=list)
    # Seconds in which nothing ran because the gate was closed; they are not counted.
    held_s: float = 0.0
    elapsed_s: float = 0.0


Gate = Callable[[], Awaitable[None]]


async def _open_gate() -> None:
    return None


def base_url(text: str) -> str:
    """Checked and without a slash at its end. Raises BadRequest."""
    parts = urlsplit(text.strip())
    try:
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise BadRequest(
            f"{text[:200]!r} is no address of a server; it must begin with http:// or https://, "
            "for example http://127.0.0.1:8000/v1.",
            param="url",
        )
    path = parts.path.rstrip("/") or "/v1"
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


@asynccontextmanager
async def session(target: Target) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S),
        read_bufsize=_MAX_LINE_BYTES,
    ) as client:
        yield client


async def first_model(target: Target) -> str:
    """The model that a server names first. Raises LoadFailed when it names none."""
    url = f"{target.base_url}/models"
    try:
        async with (
            session(target) as client,
            client.get(url, allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise LoadFailed(f"{url} answered {response.status}: {await _complaint(response)}")
            models = json.loads(await response.text())["data"]
            return str(models[0]["id"])
    except (aiohttp.ClientError, TimeoutError, OSError) as exc:
        raise LoadFailed(
            f"The server at {target.base_url} cannot be reached: {_words(exc)}. Check that it runs."
        ) from exc
    except (ValueError, LookupError, TypeError) as exc:
        raise LoadFailed(f"{url} names no model. Is this an OpenAI-compatible server?") from exc


async def run_level(
    client: aiohttp.ClientSession,
    target: Target,
    mix: Mix,
    load: Load,
    *,
    level_s: float,
    max_requests: int,
    first: int = 0,
    gate: Gate = _open_gate,
) -> float:
    """Load the server with `load.users` users; returns the counted seconds.

    After `level_s` counted seconds no request is sent any more, and answers that have begun are
    cut. Those without a first token are waited for: leaving them out would hide the slowest.

    Raises:
        LoadFailed: nothing was answered.
    """
    level = _Level(client, target, mix, load, level_s, max_requests, first, gate)
    return await level.run()


class _Level:
    def __init__(
        self,
        client: aiohttp.ClientSession,
        target: Target,
        mix: Mix,
        load: Load,
        level_s: float,
        max_requests: int,
        first: int,
        gate: Gate,
    ) -> None:
        self._client, self._target, self._mix, self._load = client, target, mix, load
        self._level_s, self._gate = level_s, gate
        self._numbers = iter(range(first, first + max_requests))
        self._began_s = time.monotonic()
        self._over = asyncio.Event()
        self._idle_since_s: float | None = None

    async def run(self) -> float:
        users = [asyncio.ensure_future(self._user()) for _ in range(self._load.users)]
        clock = asyncio.ensure_future(self._clock())
        try:
            await asyncio.gather(*users)
        finally:
            for task in (*users, clock):
                task.cancel()
            await asyncio.gather(*users, clock, return_exceptions=True)
        counted_s = self._counted_s()
        if self._over.is_set():
            counted_s = min(counted_s, self._level_s)
        if not any(answer.stamps_s for answer in self._load.answers):
            raise LoadFailed(_first_error(self._load.answers))
        return max(counted_s, 1e-6)

    def _now(self) -> float:
        """Since the level began, without the time in which everything was held."""
        return time.monotonic() - self._began_s - self._load.held_s

    def _counted_s(self) -> float:
        stamps = [stamp for answer in self._load.answers for stamp in answer.stamps_s[-1:]]
        return self._now() if self._over.is_set() else max(stamps, default=0.0)

    async def _clock(self) -> None:
        """Ends the level; a level of which a part was held lasts longer."""
        while (left_s := self._level_s - self._now_running()) > 0:
            await asyncio.sleep(min(left_s, 0.2))
            self._load.elapsed_s = min(self._now_running(), self._level_s)
        self._over.set()

    def _now_running(self) -> float:
        idle_s = 0.0 if self._idle_since_s is None else time.monotonic() - self._idle_since_s
        return self._now() - idle_s

    async def _user(self) -> None:
        while not self._over.is_set():
            await self._pass_gate()
            number = next(self._numbers, None)
            if number is None or self._over.is_set() or self._is_hopeless():
                return
            await self._one(number)

    def _is_hopeless(self) -> bool:
        answers = self._load.answers
        return len(answers) >= HOPELESS_FAILURES and all(answer.error for answer in answers)

    async def _pass_gate(self) -> None:
        self._note_idle()
        try:
            await self._gate()
        finally:
            if self._idle_since_s is not None:
                self._load.held_s += time.monotonic() - self._idle_since_s
                self._idle_since_s = None

    def _note_idle(self) -> None:
        if not self._load.open and self._idle_since_s is None:
            self._idle_since_s = time.monotonic()

    async def _one(self, number: int) -> None:
        answer = Answer(number, self._now())
        self._load.open.append(answer)
        try:
            await self._ask(answer)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError) as exc:
            answer.error = _words(exc)
        finally:
            self._load.open.remove(answer)
            if not self._load.open:
                self._note_idle()
        if not answer.error and not answer.stamps_s:
            answer.error = "the answer was empty"
        self._load.answers.append(answer)

    async def _ask(self, answer: Answer) -> None:
        target = self._target
        asked = made_up(
            self._mix,
            answer.number,
            context_tokens=target.context_tokens,
            tokens_per_word=target.tokens_per_word,
        )
        body = {
            "model": target.model,
            "messages": [{"role": "user", "content": asked.text}],
            "max_tokens": asked.answer_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            # Where a server knows it, answers have the length that was asked for.
            "ignore_eos": True,
        }
        url = f"{target.base_url}/chat/completions"
        async with self._client.post(url, json=body, allow_redirects=False) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {await _complaint(response)}"
                return
            async for line in response.content:
                if self._take(answer, line):
                    return
                if self._over.is_set() and answer.stamps_s:
                    answer.is_cut = True
                    return

    def _take(self, answer: Answer, line: bytes) -> bool:
        """One line of the stream; True at its end."""
        if not line.startswith(b"data:"):
            return False
        data = line[5:].strip()
        if data == b"[DONE]":
            return True
        event = json.loads(data)
        if event.get("error"):
            answer.error = str(event["error"].get("message", "the server failed"))[
                :_MAX_ERROR_CHARS
            ]
            return True
        if usage := event.get("usage"):
            answer.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            answer.completion_tokens = int(usage.get("completion_tokens") or 0)
        if any((choice.get("delta") or {}).get("content") for choice in event.get("choices") or ()):
            answer.stamps_s.append(self._now())
        return False


async def warm_up(target: Target, mix: Mix) -> float:
    """One short request before anything is measured; returns the server's tokens per word."""
    short = Mix(mix.name, (_WARM_UP_LENGTHS,), mix.is_code)
    load = Load(1)
    async with session(target) as client:
        await run_level(
            client, target, short, load, level_s=REQUEST_TIMEOUT_S, max_requests=1, first=-1
        )
    [answer] = load.answers
    asked = made_up(short, -1)
    if not answer.prompt_tokens:
        return TOKENS_PER_WORD
    return max(0.5, answer.prompt_tokens / len(asked.text.split()))


async def _complaint(response: aiohttp.ClientResponse) -> str:
    text = (await response.content.read(4096)).decode("utf-8", "replace")
    try:
        return str(json.loads(text)["error"]["message"])[:_MAX_ERROR_CHARS]
    except (ValueError, LookupError, TypeError):
        return text.strip()[:_MAX_ERROR_CHARS] or "no reason given"


def _words(exc: Exception) -> str:
    if isinstance(exc, TimeoutError):
        return "no answer in time"
    return f"{exc or type(exc).__name__}"[:_MAX_ERROR_CHARS]


def _first_error(answers: Sequence[Answer]) -> str:
    error = next((answer.error for answer in answers if answer.error), "no answer came")
    return f"The server answered nothing at all: {error}."
