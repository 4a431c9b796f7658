"""What the exposure page calls measured is measured."""

import ipaddress
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from appliance.exposure.reach import (
    Listening,
    ask_all,
    first_inside,
    is_let_in,
    listening_sockets,
)

LOCAL = ipaddress.ip_address("127.0.0.1")


class Doors(BaseHTTPRequestHandler):
    """Answers as the product does to a visitor; `/metrics` as to a caller of a wrong network."""

    def do_GET(self):
        status = {"/login/": 200, "/v1/models": 401, "/console/": 302, "/metrics": 403}[self.path]
        body = b""
        if status == 403:
            body = json.dumps({"error": {"message": "Your network address may not use"}}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def port():
    server = HTTPServer(("127.0.0.1", 0), Doors)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_listening_sockets_are_those_of_this_process():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        mine = Listening("127.0.0.1", listening.getsockname()[1])
        assert mine not in listening_sockets()
        listening.listen()
        assert mine in listening_sockets()
    assert mine not in listening_sockets()


def test_each_part_is_asked_at_its_own_door(port):
    answers = ask_all(LOCAL, port)
    assert {part: answer.status for part, answer in answers.items()} == {
        "chat": 200,
        "api": 401,
        "console": 302,
        "metrics": 403,
    }
    let_in = {part for part, answer in answers.items() if is_let_in(part, answer)}
    assert let_in == {"chat", "api", "console"}


def test_no_answer_is_no_answer():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        answers = ask_all(LOCAL, closed.getsockname()[1])
    assert {answer.status for answer in answers.values()} == {None}


def test_which_socket_takes_a_call():
    ten = ipaddress.ip_address("10.1.2.3")
    six = ipaddress.ip_address("fd00::1")
    assert Listening("0.0.0.0", 80).takes(ten)
    assert not Listening("0.0.0.0", 80).takes(six)
    assert Listening("::", 80).takes(ten)
    assert Listening("10.1.2.3", 80).takes(ten)
    assert not Listening("127.0.0.1", 80).takes(ten)


def test_the_first_address_inside_a_network():
    networks = [ipaddress.ip_network("10.0.0.0/8")]
    outside, inside = ipaddress.ip_address("192.168.1.1"), ipaddress.ip_address("10.2.2.2")
    assert first_inside(networks, [outside, inside]) == inside
    assert first_inside(networks, [outside]) is None
