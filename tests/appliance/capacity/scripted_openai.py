"""A small OpenAI-compatible server on a real socket, whose answers are fixed."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class ScriptedServer:
    """Counts what arrives. `refuse` answers so many requests with 503; `hold()` stops answers."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.active = 0
        self.most_active = 0
        self.left_early = 0
        self.refuse = 0
        self.words = ["one", " two", " three"]
        self.state: dict[str, Any] = {}
        self.patches: list[dict[str, Any]] = []
        self._go = asyncio.Event()
        self._go.set()
        self.arrived = asyncio.Condition()

    def hold(self) -> None:
        """From now on answers stop after their first word."""
        self._go.clear()

    def release(self) -> None:
        self._go.set()

    async def until_active(self, number: int) -> None:
        async with asyncio.timeout(30), self.arrived:
            await self.arrived.wait_for(lambda: self.active == number)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "scripted"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        if self.refuse > 0:
            self.refuse -= 1
            return web.json_response({"error": {"message": "the queue is full"}}, status=503)
        await self._count(1)
        try:
            return await self._stream(request, self.bodies[-1])
        except (asyncio.CancelledError, ConnectionError):
            self.left_early += 1
            raise
        finally:
            await self._count(-1)

    async def _count(self, by: int) -> None:
        async with self.arrived:
            self.active += by
            self.most_active = max(self.most_active, self.active)
            self.arrived.notify_all()

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, word in enumerate(self.words):
            if number:
                await self._go.wait()
            await self._event(response, {"choices": [{"delta": {"content": word}}]})
        prompt = len(body["messages"][0]["content"].split()) * 2
        usage = {"prompt_tokens": prompt, "completion_tokens": len(self.words) * 2}
        await self._event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _event(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    async def engine(self, request: web.Request) -> web.Response:
        if request.method == "PATCH":
            change = await request.json()
            self.patches.append(change)
            self.state["slots"] = {"requested": change["slots"], "effective": change["slots"]}
        return web.json_response(self.state)


@asynccontextmanager
async def scripted_server() -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer()
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/chat/completions", server.chat)
    app.router.add_route("*", "/api/engine", server.engine)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield server
    finally:
        server.release()
        await runner.cleanup()
