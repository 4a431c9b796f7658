"""The server as a process: what it says, what it refuses, how it ends."""

import contextlib
import signal
import socket
import sqlite3

import httpx
import pytest
import websockets.sync.client
from websockets.exceptions import ConnectionClosed

from tests.appliance.serving.processes import WAIT_S, Running, manage, until
from tests.e2e.server import free_port


def rows(data_dir, query):
    with contextlib.closing(sqlite3.connect(data_dir / "blockhouse.sqlite3")) as connection:
        return connection.execute(query).fetchall()


def test_without_tables_it_says_migrate(tmp_path):
    done = manage(tmp_path, "serve")
    assert done.returncode == 1
    assert "manage.py migrate" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_redis_that_is_set_it_says_so(data_dir):
    done = manage(data_dir, "serve", REDIS_URL=f"redis://:secret@127.0.0.1:{free_port()}/0")
    assert done.returncode == 1
    assert "Redis does not answer" in done.stderr
    assert "REDIS_URL" in done.stderr
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr
    assert "ready" not in done.stdout


@pytest.mark.parametrize("address", ["garbage", "redis://:pa/secret@127.0.0.1:6379/0"])
def test_a_redis_address_that_is_none_is_named_without_its_password(data_dir, address):
    done = manage(data_dir, "serve", REDIS_URL=address)
    assert done.returncode == 1
    assert "REDIS_URL is no address" in done.stderr
    assert "Traceback" not in done.stderr
    assert "'pa'" not in done.stderr


# ---- a running server, around the scripted back end


@pytest.fixture
def run(data_dir):
    started = []

    def start(drain_s=30.0, *, loaded=True):
        code = (
            "import sys, django; django.setup();"
            "from appliance.accounts.services import user_create; user_create('bob');"
            "from tests.appliance.serving.scripted_server import main; main(*sys.argv[1:])"
        )
        started.append(Running(data_dir, ["-c", code, "{port}", str(drain_s)]))
        if loaded:
            started[-1].do("loaded")
            started[-1].until_ready()
        return started[-1]

    yield start
    for running in started:
        running.end()


def test_it_answers_while_it_loads_and_says_when_it_is_ready_d09(run):
    server = run(loaded=False)
    assert server.line() == "loading: reading weights (50%)"
    assert server.get("/healthz").status_code == 200
    answer = server.get("/readyz")
    assert (answer.status_code, answer.json()["progress"]) == (503, 0.5)
    server.do("next")
    assert server.line() == "loading: warming up (90%)"
    server.do("back")
    assert server.get("/readyz").json()["progress"] == 0.5
    server.do("loaded")
    # The first step is not told again.
    assert server.line() == "ready: http://127.0.0.1/"
    assert server.get("/readyz").status_code == 200
    server.signal(signal.SIGINT)
    assert server.process.wait(WAIT_S) == 0


def test_a_stop_while_loading_ends_with_status_0_d08(run):
    server = run(loaded=False)
    server.line()
    server.signal()
    assert server.process.wait(WAIT_S) == 0


def test_a_stop_lets_answers_finish_and_sends_sockets_away_d08(run):
    server = run()
    with (
        websockets.sync.client.connect(
            f"ws://127.0.0.1:{server.port}/open", proxy=None
        ) as open_socket,
        httpx.stream("GET", server.url + "/answer", timeout=WAIT_S) as answer,
    ):
        chunks = answer.iter_text()
        seen = next(chunks)
        while " is" not in seen:
            seen += next(chunks)
        server.signal()
        until(lambda: server.get("/readyz").json()["status"] == "stopping")
        assert server.get("/healthz").status_code == 200
        server.do("go")
        seen += "".join(chunks)
        assert seen.endswith(" the capital.<Finished>")
        with pytest.raises(ConnectionClosed) as closed:
            open_socket.recv(timeout=WAIT_S)
        assert closed.value.rcvd.code == 1012
    assert server.process.wait(WAIT_S) == 0
    query = 'SELECT "end", completion_tokens FROM quotas_usagerecord ORDER BY id'
    assert rows(server.data_dir, query) == [("stop", 5)]
    assert rows(server.data_dir, "SELECT count(*) FROM quotas_quotareservation") == [(0,)]


def test_answers_that_take_too_long_are_cut_and_booked_d08(run):
    server = run(drain_s=0.2)
    with httpx.stream("GET", server.url + "/answer", timeout=WAIT_S) as answer:
        chunks = answer.iter_text()
        seen = next(chunks)
        while " is" not in seen:
            seen += next(chunks)
        server.signal()
        seen += "".join(chunks)
    assert seen.endswith("<Finished>")
    assert server.process.wait(WAIT_S) == 0
    query = 'SELECT "end", completion_tokens FROM quotas_usagerecord'
    assert rows(server.data_dir, query) == [("abort", 2)]


def test_a_second_signal_ends_at_once_d08(run):
    server = run(drain_s=600)
    with httpx.stream("GET", server.url + "/answer", timeout=WAIT_S) as answer:
        next(answer.iter_text())
        server.signal()
        until(lambda: server.get("/readyz").json()["status"] == "stopping")
        server.signal()
        assert server.process.wait(WAIT_S) == 1
    # What was held for the answer is given back by the next start, also by one that then fails.
    held = "SELECT count(*) FROM quotas_quotareservation"
    assert rows(server.data_dir, held) == [(1,)]
    start = ["manage.py", "serve", "--port", "{port}"]
    again = Running(server.data_dir, start, APPLIANCE_MODEL="no-such-model")
    try:
        assert again.process.wait(WAIT_S) == 1
    finally:
        again.end()
    assert rows(server.data_dir, held) == [(0,)]
    reserved = "SELECT minute_reserved, day_reserved, month_reserved FROM quotas_meter"
    assert set(rows(server.data_dir, reserved)) == {(0, 0, 0)}
    # And the ledger has a row for it, as for any other.
    query = 'SELECT username, source, model, "end", completion_tokens FROM quotas_usagerecord'
    assert rows(server.data_dir, query) == [("bob", "api", "scripted", "abort", 0)]


def test_an_engine_that_hangs_for_good_ends_the_process_so_that_it_is_started_again_d09(data_dir):
    code = (
        "import sys, django; django.setup();"
        "from appliance.accounts.services import user_create; user_create('bob');"
        "from tests.appliance.serving import scripted_server as scripted;"
        "scripted.main(*sys.argv[1:], scripted.hanging_backend)"
    )
    server = Running(data_dir, ["-c", code, "{port}", "30"])
    try:
        server.until_ready()
        answer = server.get("/answer")
        assert answer.text.endswith("<Finished>")
        assert server.process.wait(WAIT_S) == 1
        said = server.process.stdout.read()
        assert "restart the server" in said
    finally:
        server.end()
    assert rows(data_dir, 'SELECT "end" FROM quotas_usagerecord') == [("error",)]
    assert rows(data_dir, "SELECT count(*) FROM quotas_quotareservation") == [(0,)]


# ---- what callers may send (B11)


def talk(server, sent, *, until_closed=True):
    """Send raw bytes and read the answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for part in sent:
                connection.sendall(part)
        answer = b""
        while part := connection.recv(65536):
            answer += part
            if not until_closed and b"}" in answer:
                break
        return answer


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
LIMIT = 16 * 1024 * 1024


def test_bodies_over_the_limit_are_refused_while_they_arrive_b11(run):
    server = run()
    declared = HEAD + b"Content-Length: 500000000\r\n\r\n"
    assert talk(server, [declared], until_closed=False).startswith(b"HTTP/1.1 413")

    expecting = HEAD + b"Expect: 100-continue\r\nContent-Length: 500000000\r\n\r\n"
    answer = talk(server, [expecting], until_closed=False)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"code": "body_too_large"' in answer
    assert b"100 Continue" not in answer

    chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
    chunked = [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *([chunk] * 17), b"0\r\n\r\n"]
    assert talk(server, chunked).startswith(b"HTTP/1.1 413")
    assert server.get("/healthz").status_code == 200


def test_long_bodies_below_the_limit_reach_the_product_b11(run):
    server = run()
    for size in (2_400_000, 2_700_000, LIMIT):
        answer = httpx.post(server.url + "/no-such-path", content=b"x" * size, timeout=WAIT_S)
        assert answer.status_code in (403, 404)
    answer = httpx.post(server.url + "/no-such-path", content=b"x" * (LIMIT + 1), timeout=WAIT_S)
    assert answer.status_code == 413


def test_odd_request_lines_meet_a_refusal_c13(run):
    server = run()
    absolute = b"GET http://evil.example/healthz HTTP/1.1\r\nHost: evil.example\r\n"
    for head in (
        absolute,
        b"GET /login/ HTTP/1.1\r\nHost: evil.example\r\n",
        b"GET /login/ HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n",
        b"GET /login/ HTTP/1.1\r\n",
    ):
        answer = talk(server, [head + b"Connection: close\r\n\r\n"])
        assert answer.startswith(b"HTTP/1.1 400"), answer[:200]


def test_sockets_are_refused_before_they_open_c01(run):
    server = run()
    for origin in (None, "https://evil.example", "null"):
        with (
            pytest.raises(websockets.exceptions.InvalidStatus) as refused,
            websockets.sync.client.connect(
                f"ws://127.0.0.1:{server.port}/ws/chat/", origin=origin, proxy=None
            ),
        ):
            pass
        assert refused.value.response.status_code == 403
