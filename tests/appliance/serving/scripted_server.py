"""The real server, routes and sockets around the scripted back end, for a process of its own.

Answers hang after their second word until a file named `go` appears in the data folder; loading
waits for a file named `loaded`.
"""

import asyncio
import sys
import time
from pathlib import Path

from channels.db import database_sync_to_async
from django.conf import settings

from appliance.accounts.models import User
from appliance.asgi import application
from appliance.serving.server import ApplianceServer
from appliance.serving.services import generation_open
from appliance.serving.start import listen
from appliance.serving.types import Caller, Delta, GenerationRequest
from appliance.serving.web_server import WebServer
from tests.appliance.fake_backend import FakeBackend


class LivingBackend(FakeBackend):
    def start(self) -> None:
        self.hold(after=2)
        self.mode = "loading"
        self.tasks = [asyncio.ensure_future(self._load())]

    async def _load(self) -> None:
        await appears("loaded")
        self.mode = "ready"
        self.tasks.append(asyncio.ensure_future(self._release()))

    async def _release(self) -> None:
        await appears("go")
        self.release()

    def state(self):
        progress = (0.5, "reading weights")
        if _there("next") and not _there("back"):
            progress = (0.9, "warming up")
        return {**super().state(), "state": self.mode, "progress": progress}

    async def stop(self, grace_s: float) -> None:
        self.mode = "draining"
        print("draining", flush=True)
        deadline = asyncio.get_running_loop().time() + grace_s
        while self.running and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        for request_id in list(self.running):
            self.abort(request_id)
        self.release()


def _there(name: str) -> bool:
    return (Path(settings.DATA_DIR) / name).exists()


async def appears(name: str) -> None:
    while not _there(name):
        await asyncio.sleep(0.01)


async def answer_app(scope, receive, send):
    """One streamed answer over HTTP, and a socket that stays open; the rest is the product."""
    if scope["type"] == "http" and scope["path"] == "/answer":
        user = await database_sync_to_async(User.objects.get)(username="bob")
        generation = await generation_open(
            GenerationRequest(
                caller=Caller(user_id=user.pk, username="bob", source="api"), prompt="a b c"
            )
        )
        await send({"type": "http.response.start", "status": 200, "headers": []})
        async for event in generation:
            text = event.text if isinstance(event, Delta) else f"<{type(event).__name__}>"
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    elif scope["type"] == "websocket" and scope["path"] == "/open":
        await receive()
        await send({"type": "websocket.accept"})
        while (await receive())["type"] != "websocket.disconnect":
            pass
    else:
        await application(scope, receive, send)


def hanging_backend():
    """The real engine over a model whose first step never returns."""
    from appliance.serving.engine_backend import EngineBackend
    from inference.watchdog import Watchdog
    from tests.appliance.serving.tiny_model import save_tiny_model
    from tests.inference.faults import Faults

    class HangingRunner:
        def __init__(self, runner):
            self.load, self.close = runner.load, runner.close
            self.move_blocks, self.resize_kv = runner.move_blocks, runner.resize_kv

        def execute(self, output):
            time.sleep(3600)

    faults = Faults()
    folder = save_tiny_model(Path(settings.DATA_DIR) / "tiny")
    return EngineBackend(
        lambda report: folder,
        lambda config: HangingRunner(faults.make_runner(config)),
        config={},
        look_every_s=0.05,
        watch=lambda engine, clock: Watchdog(engine, clock, hang_s=0.3, lost_s=0.3),
    )


def main(port: str, drain_s: str, backend=LivingBackend) -> None:
    server = ApplianceServer(
        WebServer(answer_app, listen("127.0.0.1", int(port))),
        backend(),
        None,
        url="http://127.0.0.1/",
        drain_s=float(drain_s),
        say=lambda text: print(text, flush=True),
    )
    sys.exit(server.run())
