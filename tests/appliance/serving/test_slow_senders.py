"""A sender that never finishes is answered and cut off, on a simulated clock (B11)."""

from http import HTTPStatus

import pytest
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.web.http import Request

from appliance.serving import web_server
from appliance.serving.web_server import REQUEST_DEADLINE_S, RequestFactory


class Server:
    """What a request needs of its server before it is whole."""

    proxy_forwarded_address_header = None

    def protocol_connected(self, protocol):
        pass

    def protocol_disconnected(self, protocol):
        pass


class Answered(Request):
    """Answers at once, so that the connection waits for the next request."""

    def process(self):
        self.finish()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(web_server, "reactor", clock)
    return clock


@pytest.fixture
def sender(clock):
    """A connection whose request has begun."""
    channel = RequestFactory(Server()).buildProtocol(None)
    channel.callLater = clock.callLater
    transport = StringTransport()
    channel.makeConnection(transport)
    channel.dataReceived(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
    return channel, transport


@pytest.mark.parametrize("head", [b"", b"Content-Length: 100\r\n\r\n"])
def test_a_sender_of_a_byte_a_second_is_answered_with_408_b11(clock, sender, head):
    channel, transport = sender
    channel.dataReceived(head)
    for _ in range(int(REQUEST_DEADLINE_S) - 30):
        clock.advance(1)
        channel.dataReceived(b"x")
    assert transport.value() == b""
    clock.advance(30)
    assert transport.value().startswith(b"HTTP/1.1 408 ")
    assert b'"code": "request_too_slow"' in transport.value()
    clock.advance(10)
    assert transport.disconnecting


@pytest.mark.parametrize("before", [b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_request_line_that_never_ends_is_cut_off(clock, before):
    channel = RequestFactory(Server()).buildProtocol(None)
    channel.callLater = clock.callLater
    channel.requestFactory = Answered
    transport = StringTransport()
    channel.makeConnection(transport)
    channel.dataReceived(before)
    for _ in range(int(channel.timeOut)):
        assert not transport.disconnecting
        clock.advance(1)
        channel.dataReceived(b"G")
    assert transport.disconnecting


@pytest.mark.parametrize("status", [200, 408, 422, 429, 503])
def test_the_status_line_has_words_for_every_status(sender, status):
    channel, transport = sender
    request = channel.requests[0]
    request.clientproto = b"HTTP/1.1"
    request.setResponseCode(status)
    request.write(b"")
    line = transport.value().partition(b"\r\n")[0]
    assert line == f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()
