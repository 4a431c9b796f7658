"""Calls the whole ASGI application and sees every message as it is sent.

Unlike httpx's transport it does not wait for the end of an answer, so a test can look at a stream
while it runs, and leave it.
"""

import asyncio
from typing import Any

import orjson

from appliance.asgi import application

# Far above what any step here takes; a test that hangs fails with it.
DEADLINE_S = 20.0


_open: set["Answer"] = set()


async def answers_end() -> None:
    """What a test did not read to its end would hold files and slots into the next one.

    Each client leaves, as a browser does: cancelling the application instead would leave Django's
    file of the body open.
    """
    answers = list(_open)
    _open.clear()
    await asyncio.gather(*(answer.leave() for answer in answers), return_exceptions=True)


class Answer:
    def __init__(self, scope: dict[str, Any], body: bytes) -> None:
        self._sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._received.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self._task = asyncio.create_task(application(scope, self._received.get, self._sent.put))
        _open.add(self)
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self._buffer = b""
        self._ended = False

    async def start(self) -> "Answer":
        message = await self._next()
        assert message["type"] == "http.response.start"
        self.status = message["status"]
        for name, value in message["headers"]:
            self.headers[name.decode().lower()] = value.decode()
        return self

    async def chunk(self) -> bytes | None:
        """The next piece of the body as it was sent; None at the end."""
        if self._ended:
            return None
        message = await self._next()
        self._ended = not message.get("more_body", False)
        piece = message.get("body", b"")
        self.body += piece
        return piece

    async def event(self) -> Any:
        """The next frame of a stream: parsed JSON, or text for comments and [DONE]."""
        while b"\n\n" not in self._buffer:
            piece = await self.chunk()
            assert piece is not None, f"the stream ended; left over: {self._buffer!r}"
            self._buffer += piece
        frame, _, self._buffer = self._buffer.partition(b"\n\n")
        if not frame.startswith(b"data: "):
            return frame.decode()
        data = frame.removeprefix(b"data: ")
        return "[DONE]" if data == b"[DONE]" else orjson.loads(data)

    async def events(self) -> list[Any]:
        """All frames that are left, to the end of the stream."""
        while (piece := await self.chunk()) is not None:
            self._buffer += piece
        frames = self._buffer.split(b"\n\n")
        assert frames.pop() == b""
        found = []
        for frame in frames:
            data = frame.removeprefix(b"data: ")
            is_json = frame.startswith(b"data: {")
            found.append(orjson.loads(data) if is_json else data.decode())
        return found

    async def ended(self) -> "Answer":
        while await self.chunk() is not None:
            pass
        await asyncio.wait_for(self._task, DEADLINE_S)
        return self

    async def json(self) -> Any:
        await self.ended()
        return orjson.loads(self.body)

    async def leave(self) -> None:
        """Close the connection as a client does, and wait until the server let go of it."""
        self._received.put_nowait({"type": "http.disconnect"})
        await asyncio.wait_for(self._task, DEADLINE_S)

    async def _next(self) -> dict[str, Any]:
        waiting = asyncio.create_task(self._sent.get())
        done, _ = await asyncio.wait(
            {waiting, self._task}, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED
        )
        if waiting in done:
            return waiting.result()
        if self._sent.empty():
            waiting.cancel()
            self._task.result()
            raise AssertionError("the server said nothing more")
        return await waiting


class Caller:
    """Sends requests with one key."""

    def __init__(self, secret: str | None) -> None:
        self.secret = secret

    def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        headers: dict[str, str | bytes] | None = None,
        query: bytes = b"",
    ) -> Answer:
        sent: dict[str, str | bytes] = {"host": "localhost"}
        if body is not None or raw is not None:
            sent["content-type"] = "application/json"
        if self.secret is not None:
            sent["authorization"] = f"Bearer {self.secret}"
        sent.update(headers or {})
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": query,
            "headers": [
                (name.encode(), value if isinstance(value, bytes) else value.encode())
                for name, value in sent.items()
            ],
            "client": ["127.0.0.1", 4000],
            "server": ["127.0.0.1", 8000],
        }
        return Answer(
            scope, raw if raw is not None else b"" if body is None else orjson.dumps(body)
        )

    async def get(self, path: str, **kwargs: Any) -> Answer:
        return await self.send("GET", path, **kwargs).start()

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> Answer:
        return await self.send("POST", path, body, **kwargs).start()

    async def chat(self, text: str = "What is the capital of France?", **fields: Any) -> Answer:
        body = {"model": "scripted", "messages": [{"role": "user", "content": text}], **fields}
        return await self.post("/v1/chat/completions", body)
