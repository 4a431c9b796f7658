"""The open chat sockets of this process, by user. Safe to call from any thread."""

import asyncio
import threading
from collections import defaultdict
from typing import Protocol

from appliance.chat.protocol import ServerMessage


class Socket(Protocol):
    """What this module needs of a consumer. Its methods are called on its own event loop."""

    user_id: int
    session_key: str
    loop: asyncio.AbstractEventLoop

    def post(self, message: ServerMessage) -> None: ...
    def sign_out(self) -> None: ...


class Sockets:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_user: defaultdict[int, set[Socket]] = defaultdict(set)

    def add(self, socket: Socket) -> None:
        with self._lock:
            self._by_user[socket.user_id].add(socket)

    def remove(self, socket: Socket) -> None:
        with self._lock:
            sockets = self._by_user.get(socket.user_id, set())
            sockets.discard(socket)
            if not sockets:
                self._by_user.pop(socket.user_id, None)

    def all(self) -> list[Socket]:
        with self._lock:
            return [socket for sockets in self._by_user.values() for socket in sockets]

    def send_to_user(self, user_id: int, message: ServerMessage) -> None:
        """To every tab of this user. Rare events only: never the text of an answer."""
        with self._lock:
            sockets = list(self._by_user.get(user_id, ()))
        for socket in sockets:
            _call(socket, lambda socket=socket: socket.post(message))

    def close_session(self, session_key: str) -> None:
        for socket in self.all():
            if socket.session_key == session_key:
                _call(socket, socket.sign_out)


def _call(socket: Socket, action: object) -> None:
    if not socket.loop.is_closed():
        socket.loop.call_soon_threadsafe(action)  # type: ignore[arg-type]


sockets = Sockets()
