"""B17: how answers are framed on the wire, for old clients and for bodies sent in pieces."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.appliance.api.checks import CHAT, GOOD
from tests.appliance.serving.processes import WAIT_S

BODY = json.dumps(GOOD).encode()
STREAM = json.dumps({**GOOD, "stream": True}).encode()


class Wire:
    """One connection, byte by byte."""

    def __init__(self, server: Any) -> None:
        self.key = server.key
        address = ("127.0.0.1", urlsplit(server.url).port)
        self.connection = socket.create_connection(address, timeout=WAIT_S)

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def send(self, request: str, *headers: str, body: bytes = b"") -> None:
        lines = [request, "Host: 127.0.0.1", f"Authorization: Bearer {self.key}", *headers]
        self.connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    def post(self, version: str, body: bytes, *headers: str) -> None:
        kind = ("Content-Type: application/json", f"Content-Length: {len(body)}")
        self.send(f"POST {CHAT} HTTP/{version}", *kind, *headers, body=body)

    def head(self) -> dict[str, str]:
        """Status, under "", and headers of the next answer; not a byte more is read."""
        raw = b""
        while not raw.endswith(b"\r\n\r\n"):
            byte = self.connection.recv(1)
            assert byte, f"the connection ended after {raw!r}"
            raw += byte
        status, *lines = raw.decode().strip().split("\r\n")
        pairs = (line.split(": ", 1) for line in lines)
        return {"": status.split()[1], **{name.lower(): value for name, value in pairs}}

    def exactly(self, num_bytes: int) -> bytes:
        read = b""
        while len(read) < num_bytes:
            part = self.connection.recv(num_bytes - len(read))
            assert part, f"the connection ended after {read!r}"
            read += part
        return read

    def rest(self) -> bytes:
        """All that comes until the server closes the connection."""
        read = b""
        while part := self.connection.recv(65536):
            read += part
        return read


def is_answer(body: bytes) -> bool:
    return json.loads(body)["choices"][0]["message"]["content"] == "Paris is the capital."


@pytest.mark.parametrize("kept", [(), ("Connection: keep-alive",)])
def test_b17_a_stream_over_http_1_0_has_no_chunks_and_ends_with_the_connection(
    server: Any, kept: tuple[str, ...]
) -> None:
    with Wire(server) as wire:
        wire.post("1.0", STREAM, *kept)
        head = wire.head()
        frames = wire.rest()
    assert head[""] == "200"
    assert "transfer-encoding" not in head
    assert "content-length" not in head
    assert head.get("connection", "close") != "keep-alive"
    assert frames.startswith(b"data: {")
    assert frames.endswith(b"data: [DONE]\n\n")
    assert all(line == b"" or line.startswith(b"data: ") for line in frames.split(b"\n"))


@pytest.mark.parametrize("kept", [(), ("Connection: keep-alive",)])
def test_b17_a_whole_answer_over_http_1_0(server: Any, kept: tuple[str, ...]) -> None:
    with Wire(server) as wire:
        wire.post("1.0", BODY, *kept)
        head = wire.head()
        assert head[""] == "200"
        assert "transfer-encoding" not in head
        assert is_answer(wire.exactly(int(head["content-length"])))


def test_b17_a_connection_of_http_1_1_takes_one_request_after_the_other(server: Any) -> None:
    with Wire(server) as wire:
        for _ in range(2):
            wire.post("1.1", BODY)
            head = wire.head()
            assert (head[""], "transfer-encoding" in head) == ("200", False)
            assert is_answer(wire.exactly(int(head["content-length"])))
        wire.post("1.1", STREAM)
        head = wire.head()
        assert head["transfer-encoding"] == "chunked"
        assert "content-length" not in head
        stream = b""
        while size := int(wire_line(wire), 16):
            stream += wire.exactly(size)
            assert wire.exactly(2) == b"\r\n"
        assert wire.exactly(2) == b"\r\n"
        assert stream.endswith(b"data: [DONE]\n\n")
        wire.send("HEAD /v1/models HTTP/1.1")
        assert int(wire.head()["content-length"]) > 0
        # No body came: the next answer begins where the last head ended.
        wire.send("GET /v1/models HTTP/1.1")
        head = wire.head()
        assert json.loads(wire.exactly(int(head["content-length"])))["object"] == "list"


def wire_line(wire: Wire) -> bytes:
    line = b""
    while not line.endswith(b"\r\n"):
        line += wire.exactly(1)
    return line


def test_b17_a_body_in_chunks_and_one_that_waits_to_be_asked_for(server: Any) -> None:
    with Wire(server) as wire:
        kind = "Content-Type: application/json"
        wire.send(f"POST {CHAT} HTTP/1.1", kind, "Transfer-Encoding: chunked")
        for part in (BODY[:7], BODY[7:], b""):
            wire.connection.sendall(b"%x\r\n%s\r\n" % (len(part), part))
        head = wire.head()
        assert head[""] == "200"
        assert is_answer(wire.exactly(int(head["content-length"])))
        length = f"Content-Length: {len(BODY)}"
        wire.send(f"POST {CHAT} HTTP/1.1", kind, length, "Expect: 100-continue")
        assert wire.head() == {"": "100"}
        wire.connection.sendall(BODY)
        head = wire.head()
        assert is_answer(wire.exactly(int(head["content-length"])))
