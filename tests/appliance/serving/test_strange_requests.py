"""What daphne and Twisted would make of a request themselves, and must not: headers that steer
the server, forms read on the event loop. From the bytes on the wire to the application's scope."""

import asyncio

import pytest
from twisted.internet.testing import StringTransport
from twisted.web import http

from appliance.serving.web_server import RequestFactory, SocketFactory

SOCKET = (
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nOrigin: http://localhost\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
)
FORMS = {
    "fields": (b"application/x-www-form-urlencoded", b"a=1&b=2"),
    "parts": (b"multipart/form-data; boundary=x", b"--x\r\nbroken"),
    "no boundary": (b"multipart/form-data", b"{}"),
}


class Server:
    """daphne's server as far as a request needs it; keeps the scopes and bodies that arrive."""

    proxy_forwarded_address_header = None
    root_path = ""
    request_buffer_size = 8192

    def __init__(self):
        self.scopes = []
        self.queue = asyncio.Queue()
        self.ws_factory = SocketFactory(self, server="test")

    def create_application(self, protocol, scope):
        self.scopes.append(scope)
        return self.queue

    def protocol_connected(self, protocol):
        pass

    def protocol_disconnected(self, protocol):
        pass

    def log_action(self, *args):
        pass


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def send(server):
    """Send bytes on a new connection; returns what was answered so far."""
    channels = []

    def send(data: bytes) -> bytes:
        channel = RequestFactory(server).buildProtocol(None)
        transport = StringTransport()
        channel.makeConnection(transport)
        channels.append(channel)
        channel.dataReceived(data)
        return transport.value()

    yield send
    for channel in channels:
        channel.setTimeout(None)


@pytest.mark.parametrize("value", [b"/v1", b"//evil.example", b"%00", b"\xff"])
@pytest.mark.parametrize("kind", ["page", "socket"])
def test_no_caller_says_where_the_server_s_paths_begin(server, send, value, kind):
    head = SOCKET if kind == "socket" else b""
    answer = send(
        b"GET /ws/chat/ HTTP/1.1\r\nHost: localhost\r\n"
        + head
        + b"daphne-root-path: "
        + value
        + b"\r\n\r\n"
    )
    assert answer == b""
    [scope] = server.scopes
    assert scope["type"] == ("websocket" if kind == "socket" else "http")
    assert scope["root_path"] == ""


@pytest.mark.parametrize("value", [b"\xff", b"chat, \xc3\xa9", b"%ff,,"])
def test_a_socket_s_subprotocols_are_not_looked_at(server, send, value):
    answer = send(
        b"GET /ws/chat/ HTTP/1.1\r\nHost: localhost\r\n"
        + SOCKET
        + b"Sec-WebSocket-Protocol: "
        + value
        + b"\r\n\r\n"
    )
    assert answer == b""
    [scope] = server.scopes
    assert scope["subprotocols"] == []


@pytest.mark.parametrize("form", FORMS)
def test_a_form_reaches_the_application_unread(server, send, monkeypatch, form):
    def refuse(*args):
        raise AssertionError("a form was read on the event loop")

    content_type, body = FORMS[form]
    monkeypatch.setattr(http, "_getMultiPartArgs", refuse)
    monkeypatch.setattr(http, "parse_qs", refuse)
    answer = send(
        b"POST /login/ HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
        + content_type
        + b"\r\nContent-Length: %d\r\n\r\n" % len(body)
        + body
    )
    assert answer == b""
    assert server.queue.get_nowait() == {"type": "http.request", "body": body, "more_body": False}
