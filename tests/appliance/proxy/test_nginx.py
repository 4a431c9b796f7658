"""The shipped nginx configuration in front of the real server: streams, sockets, addresses."""

import contextlib
import json
import shutil
import socket
import sqlite3
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import websockets.sync.client
from websockets.exceptions import InvalidStatus

from tests.appliance.proxy.nginx import (
    NAME,
    OUTER,
    make_certificate,
    nginx,
    ports,
    shipped_site,
)
from tests.appliance.serving.processes import WAIT_S, Running, make_data_dir

# Prints a key, and the cookie of a signed-in browser. Answers hang after two words until told.
CODE = """
import sys, django; django.setup()
from tests.bench.front_end import PREPARE; exec(PREPARE); sys.stdout.flush()
from appliance.exposure.services import exposure_change, exposure_install, exposure_settings
exposure_change(None, allowed_hosts=["chat.example.org"], trusted_proxies=["127.0.0.1"])
exposure_install(exposure_settings())
from appliance.accounts.services import user_create; user_create("bob")
from tests.appliance.serving.scripted_server import main; main(sys.argv[1], "1")
"""


@dataclass
class Site:
    server: Running
    plain_port: int
    tls_port: int
    trust: ssl.SSLContext
    key: str
    cookie: str

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.tls_port}"

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(
            base_url=self.url,
            verify=self.trust,
            timeout=WAIT_S,
            headers={"Host": f"{NAME}:{self.tls_port}", "Authorization": f"Bearer {self.key}"},
            **options,
        )

    def socket(self, origin: str) -> Any:
        return websockets.sync.client.connect(
            f"wss://{NAME}:{self.tls_port}/ws/chat/",
            address=("127.0.0.1", self.tls_port),
            ssl=self.trust,
            origin=origin,
            additional_headers={"Cookie": self.cookie},
            proxy=None,
            open_timeout=WAIT_S,
        )

    def rows(self, query: str) -> list[Any]:
        database = self.server.data_dir / "blockhouse.sqlite3"
        with contextlib.closing(sqlite3.connect(database)) as connection:
            return connection.execute(query).fetchall()


@contextlib.contextmanager
def opened(data_dir: Path, folder: Path) -> Iterator[Site]:
    running = Running(data_dir, ["-c", CODE, "{port}"])
    try:
        key, name, session = running.line().split()
        running.do("loaded")
        running.until_ready()
        plain_port, tls_port = ports(2)
        certificate = folder / "certificate.pem"
        trust = make_certificate(certificate)
        text = shipped_site(running.port, plain_port, tls_port, certificate)
        with nginx(folder / "nginx", text, tls_port):
            yield Site(running, plain_port, tls_port, trust, key, f"{name}={session}")
    finally:
        running.end()


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data_dir(tmp_path_factory.mktemp("migrated"))


@pytest.fixture
def holding(migrated: Path, tmp_path: Path) -> Iterator[Site]:
    """Of its own: answers wait after their second word."""
    shutil.copytree(migrated, tmp_path / "data")
    with opened(tmp_path / "data", tmp_path) as site:
        yield site


@pytest.fixture(scope="module")
def site(migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(migrated, folder / "data")
    with opened(folder / "data", folder) as site:
        site.server.do("go")
        yield site


def chat(stream: bool = True) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    return {"model": "scripted", "messages": messages, "stream": stream}


def read_until(chunks: Iterator[str], text: str) -> str:
    seen = ""
    while text not in seen:
        seen += next(chunks)
    return seen


def check_stream(site: Site, client: httpx.Client, url: str, encoding: str | None = None) -> None:
    """The model waits after its second word, so what was read before it goes on was not kept."""
    headers = {"Accept-Encoding": "gzip, br"}
    with client.stream("POST", url, json=chat(), headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers.get("content-encoding") == encoding
        chunks = answer.iter_text()
        seen = read_until(chunks, '" is"')
        assert '" the"' not in seen
        site.server.do("go")
        assert "".join(chunks).endswith("data: [DONE]\n\n")


def test_b15_a_stream_arrives_word_by_word(holding: Site) -> None:
    with holding.client() as client:
        check_stream(holding, client, "/v1/chat/completions")
        answer = client.post("/v1/chat/completions", json=chat(stream=False))
        assert answer.json()["choices"][0]["message"]["content"] == "Paris is the capital."


def test_b15_a_stream_arrives_word_by_word_through_a_careless_proxy_too(
    holding: Site, tmp_path: Path
) -> None:
    [port] = ports(1)
    outer = OUTER.format(port=port, inner=holding.tls_port, name=NAME)
    with nginx(tmp_path / "outer", outer, port), holding.client() as client:
        # That one compresses; it still passes each piece on.
        check_stream(holding, client, f"http://127.0.0.1:{port}/v1/chat/completions", "gzip")


def test_b17_a_client_of_http_1_0_reads_a_stream_to_its_end(site: Site) -> None:
    body = json.dumps(chat()).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.0\r\nHost: {NAME}:{site.tls_port}\r\n"
        f"Authorization: Bearer {site.key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with (
        socket.create_connection(("127.0.0.1", site.tls_port), timeout=WAIT_S) as plain,
        site.trust.wrap_socket(plain, server_hostname=NAME) as connection,
    ):
        connection.sendall(head.encode() + body)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    headers, _, frames = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in headers.lower()
    assert frames.startswith(b"data: {")
    assert frames.endswith(b"data: [DONE]\n\n")


def test_the_chat_works_over_a_socket_and_only_from_our_own_pages_c01(holding: Site) -> None:
    own = f"https://{NAME}:{holding.tls_port}"
    for origin in (
        f"http://{NAME}:{holding.tls_port}",
        "https://evil.example",
        f"https://{NAME}:1",
    ):
        with pytest.raises(InvalidStatus) as refused, holding.socket(origin):
            pass
        assert refused.value.response.status_code == 403
    with holding.socket(own) as chatting:
        start = {
            "type": "generation.start",
            "conversation_id": None,
            "text": "Hello",
            "client_id": str(uuid4()),
        }
        chatting.send(json.dumps(start))
        text = ""
        while text != "Paris is":
            message = json.loads(chatting.recv(timeout=WAIT_S))
            text += message["text"] if message["type"] == "generation.delta" else ""
        holding.server.do("go")
        while message["type"] != "generation.finished":
            message = json.loads(chatting.recv(timeout=WAIT_S))
    assert message["message"]["content"] == "Paris is the capital."


def test_c11_address_and_scheme_are_the_callers_whatever_it_claims(holding: Site) -> None:
    claims = {
        "X-Forwarded-For": "10.9.8.7",
        "X-Real-IP": "10.9.8.7",
        "Forwarded": "for=10.9.8.7;proto=http",
        "X-Forwarded-Proto": "http",
        "X-Forwarded-Host": "evil.example",
    }
    transport = httpx.HTTPTransport(verify=holding.trust, local_address="127.0.0.2")
    with holding.client(transport=transport) as client:
        assert client.get("/v1/models", headers=claims).status_code == 200
        page = client.get("/login/", headers=claims)
    assert holding.rows("SELECT last_used_from FROM api_keys_apikey") == [("127.0.0.2",)]
    assert page.status_code == 200
    assert "; Secure" in page.headers["set-cookie"]
    # The plain address of the same server still works, with cookies that it can send back.
    direct = holding.server.get("/login/", headers={"Host": "127.0.0.1"})
    assert "; Secure" not in direct.headers["set-cookie"]


def test_plain_http_is_sent_to_tls_with_method_and_body(site: Site) -> None:
    url = f"http://127.0.0.1:{site.plain_port}/v1/chat/completions"
    answer = httpx.post(url, json=chat(), headers={"Host": NAME})
    assert answer.status_code == 308
    assert answer.headers["location"] == f"https://{NAME}/v1/chat/completions"


def test_c13_names_that_were_not_declared_are_refused(site: Site) -> None:
    with site.client() as client:
        for host in ("evil.example", f"{NAME}.evil.example", "127.0.0.1.nip.io"):
            for path in ("/login/", "/v1/models"):
                answer = client.get(path, headers={"Host": host})
                assert (answer.status_code, answer.json()["error"]["code"]) == (
                    400,
                    "invalid_request",
                )


def test_b05_b11_what_nginx_says_itself_is_json_too(holding: Site) -> None:
    with holding.client() as client:
        url = "/v1/chat/completions"
        for size in (17 * 1024 * 1024, 18 * 1024 * 1024):
            large = client.post(url, content=b"x" * size, headers={"Content-Type": "text/plain"})
            assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
        holding.server.process.kill()
        holding.server.process.wait()
        gone = client.get("/v1/models")
        assert (gone.status_code, gone.json()["error"]["code"]) == (503, "engine_unavailable")
        assert int(gone.headers["retry-after"]) >= 1
