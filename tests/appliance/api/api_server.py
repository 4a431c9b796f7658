"""The real server and sockets around a scripted back end, for the official clients.

What is said depends on the last message: "call" makes a call of a tool, "fail" breaks off.
"""

import sys
from collections.abc import Sequence

from appliance.asgi import application
from appliance.serving.server import ApplianceServer
from appliance.serving.start import listen
from appliance.serving.web_server import WebServer
from tests.appliance.fake_backend import FakeBackend, FakePrepared, FakeStream

PLAIN = ("Paris", " is", " the", " capital", ".")
CALL = ("I look.", "<tool_call>", '{"name": "get_weather", "arguments": {"city": "Bern"}}')


class ScriptedBackend(FakeBackend):
    words: Sequence[str] = PLAIN

    def start(self) -> None:
        """Nothing to load."""

    async def stop(self, grace_s: float) -> None:
        """Nothing runs on."""

    async def generate(self, prepared: FakePrepared) -> FakeStream:
        messages = prepared.request.messages or [{"content": ""}]
        asked = str(messages[-1]["content"])
        self.words = CALL if asked == "call" else PLAIN
        self.fail_after = 2 if asked == "fail" else None
        self.stop_found = "." if prepared.request.options.stop else None
        return await super().generate(prepared)


def main(port: str) -> None:
    server = ApplianceServer(
        WebServer(application, listen("127.0.0.1", int(port))),
        ScriptedBackend(),
        None,
        url=f"http://127.0.0.1:{port}/",
        drain_s=0.0,
        say=lambda text: print(text, flush=True),
    )
    sys.exit(server.run())
