"""The socket of the live console: updates to one admin's page, at the pace that the page takes."""

import asyncio
import logging
import time
from collections import deque
from typing import Any

import orjson
from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from django.db import DatabaseError

from appliance.accounts.models import User
from appliance.console import protocol
from appliance.console.feed import ConsoleFeed, current_feed
from appliance.console.picture import NEVER
from appliance.errors import ApplianceError

logger = logging.getLogger(__name__)

# How often an open socket is checked against the session and the account behind it.
RECHECK_S = 20.0


class ConsoleConsumer(AsyncWebsocketConsumer):
    feed: ConsoleFeed
    _task: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        user = self.scope.get("user")
        if user is None or not user.is_authenticated:
            await self.close(protocol.CLOSE_NOT_SIGNED_IN)
            return
        if not user.is_admin:
            logger.warning("refused /ws/console/ for %s, who is no admin", user.username)
            await self.close(protocol.CLOSE_NOT_ADMIN)
            return
        self.feed = current_feed()
        self._may_send = asyncio.Event()
        self._paused = False
        self._resync = False
        self._sent = 0
        self._acknowledged = 0
        self._message_times: deque[float] = deque(maxlen=protocol.MAX_MESSAGES_A_SECOND)
        self._checked_at = time.monotonic()
        await self.accept()
        self._task = asyncio.create_task(self._run(), name="console-socket")

    async def disconnect(self, code: int) -> None:
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        if self._task is None:
            return
        now = time.monotonic()
        if (
            len(self._message_times) == protocol.MAX_MESSAGES_A_SECOND
            and now - self._message_times[0] < 1.0
        ):
            await self.close(protocol.CLOSE_TOO_MANY_MESSAGES)
            return
        self._message_times.append(now)
        if text_data is None:
            await self.close(protocol.CLOSE_BAD_DATA)
            return
        if len(text_data) > protocol.MAX_MESSAGE_BYTES:
            await self.close(protocol.CLOSE_TOO_BIG)
            return
        try:
            self._take(protocol.parse_client_message(text_data))
        except ApplianceError as exc:
            await self._send_json(
                {"type": "console.error", "code": exc.code, "message": exc.message}
            )

    def _take(self, message: protocol.ClientMessage) -> None:
        if message.type == "console.ack":
            self._acknowledged = max(self._acknowledged, min(message.n, self._sent))
        elif message.type == "console.resync":
            self._resync = True
        else:
            self._paused = message.type == "console.pause"
        self._update_may_send()

    def _update_may_send(self) -> None:
        room = self._sent - self._acknowledged < protocol.MAX_UNACKNOWLEDGED
        if room and not self._paused:
            self._may_send.set()
        else:
            self._may_send.clear()

    async def _run(self) -> None:
        try:
            self._update_may_send()
            base = NEVER
            while True:
                await self._may_send.wait()
                async with self.feed.watching():
                    base = await self._stream(base)
        except Exception:
            # The consumer's edge: the page reconnects and gets everything anew.
            logger.exception("the console socket failed")
            await self.close(protocol.CLOSE_ERROR)

    async def _stream(self, base: int) -> int:
        """Send updates until the page pauses or falls behind; returns the last tick it has."""
        tick = await self.feed.newer_than(self.feed.picture.tick)
        while self._may_send.is_set():
            if not await self._is_still_allowed():
                return base
            if self._resync:
                base, self._resync = NEVER, False
            self._sent += 1
            body = self.feed.delta_since(base).decode()
            base = tick = self.feed.picture.tick
            self._update_may_send()
            await self.send(text_data=f'{{"type":"console.update","n":{self._sent},{body}}}')
            tick = await self.feed.newer_than(tick)
        return base

    async def _is_still_allowed(self) -> bool:
        """False (and closed) once the session ended or the account lost its rights."""
        now = time.monotonic()
        if now - self._checked_at < RECHECK_S:
            return True
        self._checked_at = now
        try:
            code = await self._refusal()
        except DatabaseError:
            # The database is away for a moment; the next check decides.
            logger.warning("cannot check the session of a console socket now", exc_info=True)
            return True
        if code is None:
            return True
        self._paused = True
        self._update_may_send()
        await self.close(code)
        return False

    @database_sync_to_async
    def _refusal(self) -> int | None:
        session, user = self.scope["session"], self.scope["user"]
        if not session.session_key or not session.exists(session.session_key):
            return protocol.CLOSE_NOT_SIGNED_IN
        account = User.objects.filter(pk=user.pk, is_active=True).first()
        if account is None or account.get_session_auth_hash() != user.get_session_auth_hash():
            return protocol.CLOSE_NOT_SIGNED_IN
        return None if account.is_admin else protocol.CLOSE_NOT_ADMIN

    async def _send_json(self, message: dict[str, Any]) -> None:
        await self.send(text_data=orjson.dumps(message).decode())
