"""What a browser tab does, without a browser: a signed-in socket that keeps the text it is told."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from asgiref.sync import sync_to_async
from channels.testing import WebsocketCommunicator
from django.test import Client

from appliance.accounts.models import User
from appliance.asgi import application

WAIT_S = 10
ORIGIN = b"http://localhost"


def sign_in(user: User) -> Client:
    client = Client(headers={"host": "localhost"})
    client.force_login(user)
    return client


def socket_for(client: Client | None, *, origin: bytes | None = ORIGIN) -> WebsocketCommunicator:
    headers = [(b"host", b"localhost")]
    if origin is not None:
        headers.append((b"origin", origin))
    if client is not None:
        cookie = client.cookies["sessionid"].value
        headers.append((b"cookie", f"sessionid={cookie}".encode()))
    return WebsocketCommunicator(application, "/ws/chat/", headers=headers)


@dataclass
class Tab:
    socket: WebsocketCommunicator
    client: Client
    # Message id -> text, kept by the rules of the protocol.
    texts: dict[int, str] = field(default_factory=dict)
    seqs: dict[int, int] = field(default_factory=dict)
    gaps: int = 0

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send_json_to({"type": kind, **fields})

    async def ask(self, text: str, conversation_id: str | None = None, **fields: Any) -> str:
        client_id = fields.pop("client_id", str(uuid4()))
        await self.send(
            "generation.start", conversation_id=conversation_id, text=text, client_id=client_id
        )
        return client_id

    async def next(self) -> dict[str, Any]:
        message: dict[str, Any] = await self.socket.receive_json_from(timeout=WAIT_S)
        if message["type"] == "generation.delta":
            key, start = message["message_id"], message["from_seq"]
            if start == 0:
                self.texts[key] = message["text"]
            elif start == self.seqs.get(key):
                self.texts[key] += message["text"]
            else:
                self.gaps += 1
            self.seqs[key] = message["seq"]
        return message

    async def until(self, *kinds: str) -> dict[str, Any]:
        """The next message of one of these kinds; what comes before it is read."""
        while True:
            message = await self.next()
            if message["type"] in kinds:
                return message

    async def all_of(self, *kinds: str) -> list[dict[str, Any]]:
        """The next message of each of these kinds, in whatever order they come."""
        found: dict[str, dict[str, Any]] = {}
        while len(found) < len(kinds):
            message = await self.until(*kinds)
            found.setdefault(message["type"], message)
        return [found[kind] for kind in kinds]

    async def answered(self, text: str, conversation_id: str | None = None) -> dict[str, Any]:
        """Ask, wait for the end, and return the answer's message."""
        await self.ask(text, conversation_id)
        final = await self.until("generation.finished")
        message: dict[str, Any] = final["message"]
        return message

    async def settled(self) -> None:
        """Until everything sent so far was handled."""
        await self.send("ping")
        await self.until("pong")

    async def closed_with(self) -> int:
        while True:
            output = await self.socket.receive_output(timeout=WAIT_S)
            if output["type"] == "websocket.close":
                code: int = output["code"]
                return code

    async def close(self) -> None:
        await self.socket.disconnect(timeout=WAIT_S)


class Tabs:
    def __init__(self) -> None:
        self.opened: list[Tab] = []

    async def open(self, user: User, client: Client | None = None) -> Tab:
        if client is None:
            client = await sync_to_async(sign_in)(user)
        tab = Tab(socket_for(client), client)
        connected, _ = await tab.socket.connect(timeout=WAIT_S)
        assert connected
        self.opened.append(tab)
        return tab

    async def close_all(self) -> None:
        for tab in self.opened:
            if not tab.socket.future.done():
                await tab.close()


async def holds(backend: Any) -> None:
    """Wait until the scripted stream stands at its hold."""
    await asyncio.wait_for(backend.holding.wait(), WAIT_S)


def frames(*values: Any) -> list[str]:
    return [json.dumps(value) for value in values]
