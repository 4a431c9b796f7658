"""daphne, with what a server that others can reach needs: bounds on what a caller may send, close
codes that sockets understand, and an orderly end. Runs on the main thread's event loop.
"""

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterable
from http import HTTPStatus
from typing import Any

from daphne.http_protocol import HTTPFactory, WebRequest
from daphne.server import Server, twisted_loop
from daphne.ws_protocol import WebSocketFactory, WebSocketProtocol
from twisted.internet import defer, reactor, tcp
from twisted.logger import globalLogBeginner
from twisted.web.http import HTTPChannel

from appliance.errors import ApplianceError, RequestTooSlow
from appliance.exposure.middleware import body_too_large, error_json
from appliance.exposure.policy import policy_current

# A caller must have sent the whole request within this time.
REQUEST_DEADLINE_S = 120.0
# What is still read, and thrown away, of a refused request, so that its sender sees the answer.
_LINGER_BYTES = 64 * 1024 * 1024
_LINGER_S = 5.0
SERVICE_RESTART = 1012
# daphne believes the first, whoever sent it, and then routes and links start elsewhere; it fails
# on odd bytes in both. No socket of ours has a subprotocol.
_NOT_FOR_CALLERS = (b"Daphne-Root-Path", b"Sec-WebSocket-Protocol")
_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}


class PromptTransport(tcp.Server):
    """Sends at once what the socket takes. The reactor would wait for its next turn, which costs
    every piece of a stream two more system calls and half as much time again."""

    def write(self, data: bytes) -> None:
        is_idle = not (self._tempDataBuffer or self.dataBuffer or self._writeDisconnected)
        if data and is_idle and self.connected:
            sent = self.writeSomeData(data)
            # Else the connection is lost, and the reactor finds that in its own way.
            if isinstance(sent, int):
                data = data[sent:]
        super().write(data)

    def writeSequence(self, pieces: Iterable[bytes]) -> None:
        self.write(b"".join(pieces))


class BoundedRequest(WebRequest):
    """Refuses a body that is too large or too slow while it arrives.

    The server reads a body whole before the application starts, so the application alone could
    not bound memory and disk.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Twisted would read a form on the event loop, seconds for one of megabytes, and answer a
        # broken one itself. Django reads it anew anyway.
        super().__init__(*args, parsePOSTFormSubmission=False, **kwargs)
        self._num_body_bytes = 0
        self._is_refused = False
        self._timer = reactor.callLater(REQUEST_DEADLINE_S, self._too_slow)

    def setResponseCode(self, code: int, message: bytes | None = None) -> None:
        # Twisted has no words for the newer ones: 422, 429.
        super().setResponseCode(code, message or _PHRASES.get(code))

    def gotLength(self, length: int | None) -> None:
        super().gotLength(length)
        limit = policy_current().max_body_bytes
        if length is not None and length > limit:
            # Else the caller would be told to go on right after the refusal.
            self.requestHeaders.removeHeader(b"Expect")
            self._refuse(body_too_large(limit))

    def handleContentChunk(self, data: bytes) -> None:
        self._num_body_bytes += len(data)
        if self._is_refused:
            if self._num_body_bytes > _LINGER_BYTES:
                self.channel.transport.abortConnection()
            return
        limit = policy_current().max_body_bytes
        if self._num_body_bytes > limit:
            self._refuse(body_too_large(limit))
            return
        super().handleContentChunk(data)

    def requestReceived(self, *args: Any) -> None:
        if self._is_refused:
            self.channel.loseConnection()
            return
        self._stop_timer()
        for name in _NOT_FOR_CALLERS:
            self.requestHeaders.removeHeader(name)
        super().requestReceived(*args)

    def connectionLost(self, reason: Any) -> None:
        self._stop_timer()
        super().connectionLost(reason)

    def _too_slow(self) -> None:
        self._refuse(RequestTooSlow("The request took too long to arrive."))

    def _refuse(self, exc: ApplianceError) -> None:
        """Answer now, then let the sender finish for a moment before the connection ends."""
        self._stop_timer()
        self._is_refused = True
        body = error_json(exc)
        head = (
            f"HTTP/1.1 {exc.status} Refused\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.channel.transport.write(head.encode("ascii") + body)
        self._timer = reactor.callLater(_LINGER_S, self.channel.loseConnection)

    def _stop_timer(self) -> None:
        if self._timer.active():
            self._timer.cancel()


class Socket(WebSocketProtocol):
    def handle_reply(self, message: dict[str, Any]) -> None:
        """Closes also with the codes that are a server's own, such as 1009 or 1012."""
        if message.get("type") == "websocket.close" and self.state == self.STATE_OPEN:
            reason = (message.get("reason") or "").encode()[:123]
            self.sendCloseFrame(code=message.get("code") or 1000, reasonUtf8=reason)
            return
        super().handle_reply(message)


class SocketFactory(WebSocketFactory):
    protocol = Socket


class Channel(HTTPChannel):
    def resetTimeout(self) -> None:
        # A byte now and then is no request: until its first line is there, time runs on.
        if self.requests:
            super().resetTimeout()


class RequestFactory(HTTPFactory):
    protocol = Channel

    def buildProtocol(self, addr: Any) -> Any:
        protocol = super().buildProtocol(addr)
        protocol.requestFactory = BoundedRequest
        return protocol


class WebServer(Server):
    """Serves `application` on a socket that listens already."""

    def __init__(self, application: Any, listening: socket.socket) -> None:
        # The endpoint is a placeholder: `run_with` takes the socket.
        super().__init__(application, endpoints=["listening"], server_name="blockhouse")
        self._listening = listening

    def run_with(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run the event loop until `stop()`; `main` is started on it as a task."""
        self.connections: dict[Any, dict[str, Any]] = {}
        self.http_factory = RequestFactory(self)
        self.ws_factory = SocketFactory(self, server=self.server_name)
        self.ws_factory.setProtocolOptions(
            autoPingTimeout=self.ping_timeout,
            allowNullOrigin=True,
            openHandshakeTimeout=self.websocket_connect_timeout,
            maxMessagePayloadSize=self.websocket_max_message_size,
            maxFramePayloadSize=self.websocket_max_frame_size,
        )
        globalLogBeginner.beginLoggingTo(
            [lambda _: None], redirectStandardIO=False, discardBuffer=True
        )
        reactor.callLater(1, self.application_checker)
        reactor.callLater(2, self.timeout_checker)
        self._listening.setblocking(False)
        port = reactor.adoptStreamPort(
            self._listening.fileno(), self._listening.family, self.http_factory
        )
        port.transport = PromptTransport
        self._listening.close()  # the reactor has its own copy
        asyncio.set_event_loop(twisted_loop)
        reactor.addSystemEventTrigger("before", "shutdown", self.kill_all_applications)
        tasks = []
        reactor.callWhenRunning(lambda: tasks.append(asyncio.ensure_future(main())))
        reactor.run(installSignalHandlers=False)

    def close_sockets(self, code: int) -> None:
        for protocol in list(self.connections):
            if isinstance(protocol, Socket) and protocol.state == protocol.STATE_OPEN:
                protocol.sendCloseFrame(code=code, reasonUtf8=b"the server restarts")

    async def responses_wait(self, timeout_s: float) -> None:
        """Wait for HTTP answers under way."""
        await self._applications_wait(WebRequest, timeout_s)

    async def sockets_wait(self, timeout_s: float) -> None:
        await self._applications_wait(Socket, timeout_s)

    async def _applications_wait(self, kind: type, timeout_s: float) -> None:
        running = [
            details["application_instance"]
            for protocol, details in self.connections.items()
            if isinstance(protocol, kind) and "application_instance" in details
        ]
        if running:
            await asyncio.wait(running, timeout=timeout_s)

    def kill_all_applications(self) -> "defer.Deferred[Any]":
        """Also where a connection has no application, as one that is kept open has none."""
        running = [
            details["application_instance"]
            for details in self.connections.values()
            if "application_instance" in details
        ]
        for application in running:
            application.cancel()
        gathered = asyncio.gather(*running, return_exceptions=True)
        return defer.Deferred.fromFuture(gathered)
