"""`manage.py serve` whole: first start, tuning, second start, end. With a tiny real model."""

import contextlib
import re
import sqlite3
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.appliance.serving.processes import WAIT_S, Running, manage, run_python, until
from tests.appliance.serving.tiny_model import save_tiny_model

MAKE_KEY = """
import django; django.setup()
from appliance.accounts.services import user_create
from appliance.api_keys.services import api_key_issue
print(api_key_issue(user_create("alice", is_admin=True), "test", ["chat", "models", "admin"])[1])
"""


@pytest.fixture
def serve(tmp_path, data_dir):
    model_dir = save_tiny_model(tmp_path / "tiny")
    settings = {"APPLIANCE_MODEL": str(model_dir), "OMP_NUM_THREADS": "1"}
    started = []

    def start(**changes):
        command = ["manage.py", "serve", "--port", "{port}"]
        started.append(Running(data_dir, command, **{**settings, **changes}))
        return started[-1]

    yield start
    for server in started:
        server.end()


def children(server):
    return [child.pid for child in psutil.Process(server.process.pid).children(recursive=True)]


def test_from_the_first_start_to_the_second(serve):
    server = serve().until_ready()
    assert server.lines[-1] == f"ready: {server.url}/"
    said = "\n".join(server.lines)
    assert re.search(r"SECRET_KEY +set +\(data folder\)", said)
    [link] = re.findall(r"^set-up: (\S+)$", said, re.MULTILINE)
    assert link.startswith(server.url)
    assert httpx.get(link).status_code == 200
    assert server.get("/readyz").json() == {"status": "ready"}

    # The worker beside it, and a second server on the same data.
    until(lambda: len(children(server)) >= 1)
    workers = children(server)
    second = manage(server.data_dir, "serve", "--port", "1")
    assert second.returncode == 1
    assert f"process {server.process.pid}" in second.stderr

    made = run_python(server.data_dir, "-c", MAKE_KEY)
    key = {"Authorization": f"Bearer {made.stdout.strip()}"}
    model = server.get("/v1/models", headers=key).json()["data"][0]["id"]
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    url = server.url + "/v1/chat/completions"
    answer = httpx.post(url, json=asked, headers=key, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8

    tuned = {"slots": 3, "class_weights": {"interactive": 4, "background": 0.5}}
    changed = httpx.patch(server.url + "/api/engine", json=tuned, headers=key).json()
    assert changed["slots"]["requested"] == 3
    assert changed["settings"]["class_weights"]["effective"]["api"] == 1
    assert server.get("/metrics", headers=key).text.count("blockhouse_slots 3.0") == 1

    server.signal()
    assert server.process.wait(WAIT_S) == 0
    until(lambda: not any(psutil.pid_exists(pid) for pid in workers))

    again = serve().until_ready()
    assert "set-up:" not in "\n".join(again.lines)
    state = again.get("/api/engine", headers=key).json()
    assert state["slots"]["requested"] == 3
    assert state["settings"]["class_weights"]["requested"] == tuned["class_weights"]
    assert state["kv"]["blocks_total"] == state["kv"]["blocks_free"]

    # A server that is killed leaves no worker behind.
    until(lambda: len(children(again)) >= 1)
    workers = children(again)
    again.process.kill()
    until(lambda: not any(_runs(pid) for pid in workers))


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_model_that_is_not_there_ends_the_start_with_its_reason(serve):
    server = serve(APPLIANCE_MODEL="no-such-model")
    while server.line():
        pass
    assert server.process.wait(WAIT_S) == 1
    assert "no model 'no-such-model'" in "\n".join(server.lines)
    assert "manage.py models" in "\n".join(server.lines)


def test_what_waits_at_a_stop_is_refused_and_costs_nothing_d08(serve):
    # Time enough for the one that runs: here it must not be cut.
    server = serve(APPLIANCE_DRAIN_SECONDS=str(WAIT_S)).until_ready()
    made = run_python(server.data_dir, "-c", MAKE_KEY)
    key = {"Authorization": f"Bearer {made.stdout.strip()}"}
    asked = {
        "model": server.get("/v1/models", headers=key).json()["data"][0]["id"],
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 400,
        "ignore_eos": True,
    }
    engine = server.url + "/api/engine"
    assert httpx.patch(engine, json={"slots": 1}, headers=key).status_code == 200

    def ask(number):
        url = server.url + "/v1/chat/completions"
        return httpx.post(url, json=asked, headers=key, timeout=WAIT_S)

    with ThreadPoolExecutor(16) as pool:
        asking = [pool.submit(ask, number) for number in range(16)]
        until(lambda: server.get("/api/engine", headers=key).json()["waiting"] >= 4)
        server.signal()
        answers = [one.result() for one in asking]
    assert server.process.wait(WAIT_S) == 0
    refused = [answer for answer in answers if answer.status_code != 200]
    assert refused
    for answer in refused:
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["code"] == "engine_unavailable"
        assert int(answer.headers["retry-after"]) >= 1
    with contextlib.closing(sqlite3.connect(server.data_dir / "blockhouse.sqlite3")) as database:
        costs = "SELECT prompt_tokens + completion_tokens FROM quotas_usagerecord WHERE "
        failed = database.execute(f"{costs} \"end\" = 'error'").fetchall()
        answered = database.execute(f"{costs} \"end\" != 'error'").fetchall()
        used = database.execute("SELECT day_used, day_reserved FROM quotas_meter").fetchall()
        # Of the user and of the key.
        assert used == [(sum(cost for (cost,) in answered), 0)] * 2
    assert set(failed) == {(0,)}
