"""Who may speak to the server at all: host names, networks, proxies, origins, body sizes."""

import ipaddress
import json

import httpx
import pytest
from channels.testing import WebsocketCommunicator

from appliance.exposure.middleware import ExposureMiddleware
from appliance.exposure.policy import ExposurePolicy, policy_install, policy_remove


async def echo_app(scope, receive, send):
    """Answers with what the product would believe of the caller."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": scope["client"][0]})
        return
    num_bytes, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        num_bytes += len(message.get("body", b""))
        more = message.get("more_body", False)
    seen = {
        "client": scope["client"][0],
        "scheme": scope["scheme"],
        "bytes": num_bytes,
        "headers": [[k.decode(), v.decode("latin-1")] for k, v in scope["headers"]],
    }
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(seen).encode()})


APP = ExposureMiddleware(echo_app)


def networks(*texts):
    return tuple(ipaddress.ip_network(text) for text in texts)


@pytest.fixture(autouse=True)
def policy(own_policy):
    def install(**changes):
        fields = {
            "hosts": ("localhost", "127.0.0.1", "[::1]", "box.example"),
            "networks": None,
            "proxies": (),
            "max_body_bytes": 1000,
        }
        policy_install(ExposurePolicy(**{**fields, **changes}))

    install()
    return install


async def call(headers, *, path="/x", client="127.0.0.1", method="GET", scheme="http", body=()):
    """One raw ASGI request: httpx would mend the very headers under test."""
    sent = []
    chunks = list(body) or [b""]

    async def receive():
        if not chunks:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "scheme": scheme,
        "client": [client, 5000],
        "headers": headers,
    }
    await APP(scope, receive, send)
    body = sent[1]["body"]
    is_page = (b"content-type", b"text/html") in sent[0]["headers"]
    return sent[0]["status"], body.decode() if is_page else json.loads(body)


HOST = (b"host", b"localhost:8000")


async def test_a_browser_that_is_refused_gets_a_page_and_a_script_json():
    accept = (b"accept", b"text/html,application/xhtml+xml,*/*;q=0.8")
    status, page = await call([(b"host", b"<b>.example"), accept])
    assert status == 400
    assert page.startswith("<!doctype html>")
    assert "ask an admin to add this one" in page
    assert "<b>" not in page
    status, body = await call([(b"host", b"evil.example"), (b"accept", b"*/*")])
    assert (status, body["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST", "localhost:8000", "127.0.0.1:1", "[::1]", "[::1]:8000"]
)
async def test_declared_names_pass_with_any_port_and_case_c13(host):
    status, _ = await call([(b"host", host.encode())])
    assert status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        ":8000",
        "",
        "localhost@evil.example",
        "evil.example/localhost",
        "localhost, evil.example",
        "*",
        "caf\xe9",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
async def test_other_names_are_refused_before_the_product_c13(host, method):
    status, body = await call([(b"host", host.encode("latin-1"))], method=method)
    assert status == 400
    assert body["error"]["code"] == "invalid_request"


async def test_no_host_and_two_hosts_are_refused_c13():
    assert (await call([]))[0] == 400
    assert (await call([HOST, HOST]))[0] == 400


async def test_an_absolute_request_line_is_refused_c13():
    assert (await call([HOST], path="http://evil.example/healthz"))[0] == 400


async def test_a_star_in_allowed_hosts_allows_nothing_c13(settings):
    policy_remove()
    settings.ALLOWED_HOSTS = ["*"]
    assert (await call([(b"host", b"evil.example")]))[0] == 400


async def test_forwarded_host_never_names_the_server_c13():
    status, _ = await call([(b"host", b"evil.example"), (b"x-forwarded-host", b"localhost")])
    assert status == 400


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_probes_need_no_known_name_c13_d09(path):
    status, seen = await call([(b"host", b"10.1.2.3:8000")], path=path)
    assert status == 200
    assert [v for k, v in seen["headers"] if k == "host"] == ["localhost"]


@pytest.mark.parametrize("path", ["/healthz/", "/HEALTHZ", "/v1/healthz", "//healthz"])
async def test_only_the_exact_probe_paths_are_exempt(path):
    assert (await call([(b"host", b"evil.example")], path=path))[0] == 400


async def test_peers_outside_the_networks_are_refused(policy):
    policy(networks=networks("10.0.0.0/8", "::1/128"))
    assert (await call([HOST], client="10.9.9.9"))[0] == 200
    assert (await call([HOST], client="::ffff:10.9.9.9"))[0] == 200
    assert (await call([HOST], client="::1"))[0] == 200
    assert (await call([HOST], client="11.0.0.1"))[0] == 403
    assert (await call([HOST], client="not-an-address"))[0] == 403


FORGED = [
    [(b"x-forwarded-for", b"127.0.0.1")],
    [(b"x-forwarded-for", b"1.2.3.4, 127.0.0.1")],
    [(b"x-forwarded-for", b"garbage")],
    [(b"x-forwarded-for", b"127.0.0.1, " * 500)],
    [(b"x-forwarded-for", b"127.0.0.1"), (b"x-forwarded-for", b"10.0.0.1")],
    [(b"x-real-ip", b"127.0.0.1")],
    [(b"forwarded", b"for=127.0.0.1;proto=https")],
    [(b"x-forwarded-proto", b"https")],
]


@pytest.mark.parametrize("forged", FORGED)
async def test_forwarding_headers_of_strangers_are_ignored_and_dropped_c11(policy, forged):
    policy(proxies=networks("10.0.0.1"), networks=networks("127.0.0.0/8", "10.0.0.0/8"))
    assert (await call([HOST, *forged], client="203.0.113.9"))[0] == 403
    policy(proxies=networks("10.0.0.1"))
    status, seen = await call([HOST, *forged], client="203.0.113.9")
    assert status == 200
    assert (seen["client"], seen["scheme"]) == ("203.0.113.9", "http")
    assert [k for k, _ in seen["headers"]] == ["host"]


@pytest.mark.parametrize(
    ("forwarded", "believed"),
    [
        (["203.0.113.9"], "203.0.113.9"),
        (["127.0.0.1, 203.0.113.9"], "203.0.113.9"),
        (["127.0.0.1", "203.0.113.9"], "203.0.113.9"),
        (["127.0.0.1, 203.0.113.9, 10.0.0.2"], "203.0.113.9"),
        (["127.0.0.1, garbage"], "10.0.0.1"),
        (["garbage, 203.0.113.9"], "203.0.113.9"),
        (["203.0.113.9:4711"], "203.0.113.9"),
        (["[2001:db8::1]:4711"], "2001:db8::1"),
        (["10.0.0.2"], "10.0.0.2"),
        ([""], "10.0.0.1"),
        (["127.0.0.1, " * 500 + "203.0.113.9"], "203.0.113.9"),
    ],
)
async def test_a_known_proxy_is_read_from_the_right_c11(policy, forwarded, believed):
    policy(proxies=networks("10.0.0.1", "10.0.0.2"))
    headers = [HOST, *((b"x-forwarded-for", value.encode()) for value in forwarded)]
    _, seen = await call(headers, client="10.0.0.1")
    assert seen["client"] == believed


async def test_a_known_proxys_caller_is_held_to_the_networks_c11(policy):
    policy(proxies=networks("10.0.0.1"), networks=networks("10.0.0.0/8"))
    headers = [HOST, (b"x-forwarded-for", b"203.0.113.9")]
    assert (await call(headers, client="10.0.0.1"))[0] == 403


async def test_a_known_proxy_says_the_scheme_c11(policy):
    policy(proxies=networks("10.0.0.1"))
    headers = [HOST, (b"x-forwarded-proto", b"https")]
    assert (await call(headers, client="10.0.0.1"))[1]["scheme"] == "https"


async def socket_opens(origin, *, host="localhost:8000", client="127.0.0.1", extra=()):
    headers = [(b"host", host.encode()), *extra]
    if origin is not None:
        headers.append((b"origin", origin.encode("latin-1")))
    communicator = WebsocketCommunicator(APP, "/ws/chat/", headers=headers)
    communicator.scope["client"] = [client, 5000]
    opened, code = await communicator.connect()
    if not opened:
        assert code == 4403
    await communicator.disconnect()
    return opened


@pytest.mark.parametrize(
    ("origin", "opens"),
    [
        ("http://localhost:8000", True),
        ("HTTP://LOCALHOST:8000", True),
        ("http://localhost", False),
        ("http://localhost:8001", False),
        ("https://localhost:8000", False),
        ("http://127.0.0.1:8000", False),
        ("https://evil.example", False),
        ("http://localhost:8000.evil.example", False),
        ("http://localhost:8000@evil.example", False),
        ("http://user@localhost:8000", False),
        ("http://localhost:8000/path", False),
        ("http://localhost:99999", False),
        ("http://[::1", False),
        ("ws://localhost:8000", False),
        ("null", False),
        ("", False),
        ("caf\xe9", False),
        (None, False),
    ],
)
async def test_sockets_open_only_for_pages_of_the_same_origin_c01(origin, opens):
    assert await socket_opens(origin) is opens


async def test_sockets_know_ipv6_literals_and_default_ports_c01():
    assert await socket_opens("http://[::1]:8000", host="[::1]:8000")
    assert await socket_opens("http://box.example", host="box.example:80")
    assert not await socket_opens("http://evil.example", host="evil.example")


async def test_sockets_behind_a_tls_proxy_compare_https_c01(policy):
    policy(proxies=networks("10.0.0.1"))
    tls = [(b"x-forwarded-proto", b"https"), (b"x-forwarded-for", b"10.7.7.7")]
    page = "https://box.example"
    assert await socket_opens(page, host="box.example", client="10.0.0.1", extra=tls)
    assert not await socket_opens(page, host="box.example", client="10.0.0.3", extra=tls)


async def test_a_body_at_the_limit_passes_and_one_byte_more_is_413_b11():
    length = [(b"content-length", b"1000")]
    status, seen = await call([HOST, *length], method="POST", body=[b"x" * 1000])
    assert (status, seen["bytes"]) == (200, 1000)
    status, body = await call([HOST, (b"content-length", b"1001")], method="POST")
    assert (status, body["error"]["code"]) == (413, "body_too_large")


async def test_a_body_without_length_is_cut_while_it_is_read_b11():
    status, body = await call([HOST], method="POST", body=[b"x" * 600, b"x" * 600, b"x" * 600])
    assert (status, body["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("length", [b"-1", b"ten", b"1e3", b"", b"9" * 5000])
async def test_odd_lengths_are_refused_b11(length):
    status, _ = await call([HOST, (b"content-length", length)], method="POST")
    assert status in (400, 413)


async def test_a_foreign_origin_gets_no_cors_headers():
    transport = httpx.ASGITransport(APP)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post("/v1/models", headers={"origin": "https://evil.example"})
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.django_db
@pytest.mark.parametrize("is_tls", [True, False])
def test_cookies_of_a_tls_page_are_secure_and_others_work_without_c22(is_tls, client, bob):
    page = client.get("/login/", headers={"host": "localhost"}, secure=is_tls)
    assert {bool(cookie["secure"]) for cookie in page.cookies.values()} == {is_tls}
