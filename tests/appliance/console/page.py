"""A console page without a browser: a signed-in socket that puts the updates together."""

import json
from typing import Any

from asgiref.sync import sync_to_async
from channels.testing import WebsocketCommunicator
from django.test import Client

from appliance.accounts.models import User
from appliance.asgi import application
from tests.appliance.console.map_reader import MapReader

WAIT_S = 10


def sign_in(user: User) -> Client:
    client = Client(headers={"host": "localhost"})
    client.force_login(user)
    return client


def socket_for(client: Client | None, origin: str | None = "http://localhost") -> Any:
    headers = [(b"host", b"localhost")]
    if origin is not None:
        headers.append((b"origin", origin.encode()))
    if client is not None:
        headers.append((b"cookie", f"sessionid={client.cookies['sessionid'].value}".encode()))
    return WebsocketCommunicator(application, "/ws/console/", headers=headers)


class Page:
    """Acknowledges as the browser does, unless told not to."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.tick = -1
        self.map = MapReader()
        self.rows: dict[int, dict[str, Any]] = {}
        self.state: dict[str, Any] = {}
        self.events: list[str] = []
        self.samples = 0
        self.sizes: list[int] = []
        self._fields: list[str] = []

    @classmethod
    async def open(cls, user: User) -> "Page":
        client = await sync_to_async(sign_in)(user)
        page = cls(socket_for(client))
        connected, code = await page.socket.connect(timeout=WAIT_S)
        assert connected, code
        return page

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send_json_to({"type": kind, **fields})

    async def update(self, *, acknowledge: bool = True) -> dict[str, Any]:
        text = await self.socket.receive_from(timeout=WAIT_S)
        self.sizes.append(len(text))
        message: dict[str, Any] = json.loads(text)
        assert message["type"] == "console.update", message
        if acknowledge:
            await self.send("console.ack", n=message["n"])
        assert message["base"] in (-1, self.tick), "an update is missing before this one"
        self._apply(message)
        return message

    async def update_after(self, tick: int) -> None:
        """Take updates until one is newer than `tick`."""
        while self.tick <= tick:
            await self.update()

    def names(self) -> dict[int, str]:
        return {handle: row["id"] for handle, row in self.rows.items()}

    def live_ids(self) -> set[str]:
        return {row["id"] for row in self.rows.values() if row["ended"] is None}

    def _apply(self, message: dict[str, Any]) -> None:
        if message["base"] == -1:
            self.rows, self.state, self.samples = {}, {}, 0
            self._fields = message["fields"]
        self.tick = message["tick"]
        self.state.update(message.get("state", {}))
        for handle, *pairs in message.get("rows", []):
            row = self.rows.setdefault(handle, dict.fromkeys(self._fields))
            for index, value in zip(pairs[::2], pairs[1::2], strict=True):
                row[self._fields[index]] = value
        self.samples += len(message.get("samples", []))
        self.events += [event[4] for event in message.get("events", [])]
        self.map.apply(message["map"])
