"""`manage.py capacity`: any server by address, and the real one of a data folder."""

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.core.management import CommandError, call_command
from django.test import AsyncClient

from appliance.accounts.models import User
from appliance.capacity.models import CapacityRun
from tests.appliance.capacity.scripted_openai import ScriptedServer, scripted_server
from tests.appliance.serving.processes import Running, make_data_dir, manage, run_python
from tests.appliance.serving.tiny_model import save_tiny_model

MAKE_ADMIN = """
import django; django.setup()
from appliance.accounts.services import user_create
user_create("alice", is_admin=True)
"""
KEYS = """
import django; django.setup()
from appliance.api_keys.models import ApiKey
from appliance.quotas.models import UsageRecord
print([(key.name, key.is_live) for key in ApiKey.objects.all()])
print(sorted(set(UsageRecord.objects.values_list("source", "username"))))
"""


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as server:
        yield server


async def capacity(*arguments: str) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    await asyncio.to_thread(call_command, "capacity", *arguments, stdout=out, stderr=err)
    return out.getvalue(), err.getvalue()


async def test_measures_another_server_and_writes_the_figures(
    server: ScriptedServer, tmp_path: Path
) -> None:
    json_file, csv_file = tmp_path / "figures.json", tmp_path / "figures.csv"
    out, err = await capacity(
        *("--url", server.url, "--api-key", "secret", "--levels", "2,1", "--seconds", "1"),
        *("--json", str(json_file), "--csv", str(csv_file)),
    )
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows[:3]] == ["N", "1", "2"]
    assert re.search(r"^(Set slots to|Good up to|Too slow even at) ", out, re.MULTILINE)
    assert "1 at the same time" in err
    assert set(server.keys) == {"Bearer secret"}
    told = json.loads(json_file.read_text())
    assert [level["users"] for level in told["levels"]] == [1, 2]
    assert told["levels"][0]["memory_bytes"] is None
    assert "secret" not in json_file.read_text()
    lines = csv_file.read_text().splitlines()
    assert lines[0].startswith("users,requests,errors,")
    assert len(lines) == 3


@pytest.mark.django_db(transaction=True)
async def test_a_kept_result_of_another_server_stands_among_the_consoles_tests(
    server: ScriptedServer, alice: User
) -> None:
    await capacity(
        *("--url", server.url, "--api-key", "secret", "--levels", "1,2", "--seconds", "1"),
        "--keep",
    )
    run = await CapacityRun.objects.aget()
    address = urlsplit(server.url).netloc
    assert run.facts["server"] == address
    assert "secret" not in f"{run.plan} {run.facts}"
    client = AsyncClient(headers={"host": "localhost"})
    await client.aforce_login(alice)
    page = (await client.get("/console/capacity/")).content.decode()
    assert f"{address} is good up to 2" in page
    # Slots are set on this server, and another one was measured.
    assert 'id="apply"' not in page


async def test_a_server_that_refuses_all_is_a_failure(server: ScriptedServer) -> None:
    server.refuse = 10_000
    with pytest.raises(CommandError, match="the queue is full"):
        await capacity("--url", server.url, "--levels", "1", "--seconds", "1")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "http://127.0.0.1:9/v1"], "cannot be reached"),
        (["--url", "file:///etc/passwd"], "must begin with http:// or https://"),
        (["--levels", "1,x"], "Levels are whole numbers"),
        (["--levels", "0"], "Levels are whole numbers"),
        (["--levels", "513"], "at most 512"),
        (["--seconds", "0"], "1 to 600"),
        (["--max-ttft", "nan"], "--max-ttft must be a number"),
        (["--api-key", "x"], "--api-key goes with --url"),
        ([], "No server runs on the data folder"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: list[str], words: str) -> None:
    with pytest.raises(CommandError, match=re.escape(words)):
        call_command("capacity", *arguments, stderr=io.StringIO())


@pytest.fixture
def real_server(tmp_path: Path) -> Iterator[Running]:
    data_dir: Any = make_data_dir(tmp_path / "data")
    run_python(data_dir, "-c", MAKE_ADMIN)
    model = save_tiny_model(tmp_path / "tiny")
    running = Running(
        data_dir,
        ["manage.py", "serve", "--port", "{port}", "--no-worker"],
        APPLIANCE_MODEL=str(model),
        OMP_NUM_THREADS="1",
    )
    yield running.until_ready()
    running.end()


def test_measures_the_running_server_with_a_key_that_is_gone_afterwards(
    real_server: Running, tmp_path: Path
) -> None:
    figures = tmp_path / "figures.json"
    done = manage(
        real_server.data_dir, "capacity", "--levels", "1,2", "--seconds", "1", "--json", figures
    )
    assert done.returncode == 0, done.stderr
    levels = json.loads(figures.read_text())["levels"]
    assert [level["users"] for level in levels] == [1, 2]
    for level in levels:
        assert level["errors"] == 0, level["first_error"]
        assert level["memory_bytes"] > 0
        assert level["kv_share"] is not None
        assert level["slots"] >= 1
        assert level["queue_p95_s"] is not None
    keys, ledger = run_python(real_server.data_dir, "-c", KEYS).stdout.splitlines()
    assert keys == "[('Capacity test', False)]"
    assert ledger == "[('capacity', 'alice')]"
