"""A test from the click to the verdict, over the real server, worker and engine (tiny model)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.appliance.capacity.test_command import KEYS, MAKE_ADMIN
from tests.appliance.serving.processes import Running, make_data_dir, run_python, until
from tests.appliance.serving.tiny_model import save_tiny_model

START = """
import django; django.setup()
from appliance.accounts.models import User
from appliance.capacity.plan import Plan
from appliance.capacity.recommend import Limits
from appliance.capacity.start import run_start
limits = Limits(ttft_p95_s=600.0, itl_p95_s=600.0)
plan = Plan(levels=LEVELS, level_s=SECONDS, limits=limits)
print(run_start(plan, User.objects.get()).pk)
"""
LOOK = """
import json
import django; django.setup()
from appliance.capacity.models import CapacityRun
from appliance.capacity.selectors import run_as_dict
from appliance.serving.models import EngineSetting
run = CapacityRun.objects.get()
slots = list(EngineSetting.objects.filter(name="slots").values_list("value", flat=True))
told = {**run_as_dict(run), "is_open": run.is_open, "held": run.slots, "slots": slots}
print(json.dumps({**told, "progress": run.progress}))
"""
STOP = """
import django; django.setup()
from appliance.accounts.models import User
from appliance.capacity.models import CapacityRun
from appliance.capacity.services import run_stop
run_stop(CapacityRun.objects.get().pk, User.objects.get())
"""
SET_SLOTS = """
import django; django.setup()
from appliance.serving.models import EngineSetting
EngineSetting.objects.create(name="slots", value=1)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    data_dir: Any = make_data_dir(tmp_path / "data")
    run_python(data_dir, "-c", MAKE_ADMIN)
    run_python(data_dir, "-c", SET_SLOTS)
    running = Running(
        data_dir,
        ["manage.py", "serve", "--port", "{port}"],
        APPLIANCE_MODEL=str(save_tiny_model(tmp_path / "tiny")),
        OMP_NUM_THREADS="1",
    )
    yield running.until_ready()
    running.end()


def start(server: Running, levels: tuple[int, ...], level_s: float) -> None:
    code = START.replace("LEVELS", str(levels)).replace("SECONDS", str(level_s))
    done = run_python(server.data_dir, "-c", code)
    assert done.returncode == 0, done.stderr


def look(server: Running) -> dict[str, Any]:
    done = run_python(server.data_dir, "-c", LOOK)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_from_the_start_to_the_verdict_and_back_to_the_slots_of_before(server: Running) -> None:
    start(server, (1, 2), 1.0)
    until(lambda: not look(server)["is_open"])
    run = look(server)
    assert run["status"] == "done", run["reason"]
    assert [level["users"] for level in run["levels"]] == [1, 2]
    # Each level ran with as many slots as users, and the slots are as before.
    assert [level["slots"] for level in run["levels"]] == [1, 2]
    assert (run["held"], run["slots"]) == (None, [1])
    assert all(level["errors"] == 0 for level in run["levels"])
    assert run["recommended_users"] == 2
    keys, ledger = run_python(server.data_dir, "-c", KEYS).stdout.splitlines()
    assert keys == "[('Capacity test', False)]"
    assert ledger == "[('capacity', 'alice')]"


def test_stopping_ends_it_and_the_slots_go_back(server: Running) -> None:
    start(server, (3,), 600.0)
    until(lambda: look(server)["progress"].get("answered", 0) > 0)
    assert look(server)["held"] == {"before": 1, "set": 3}
    assert run_python(server.data_dir, "-c", STOP).returncode == 0
    until(lambda: not look(server)["is_open"])
    run = look(server)
    assert (run["status"], run["reason"]) == ("stopped", "alice stopped it.")
    assert (run["held"], run["slots"]) == (None, [1])


def test_a_task_is_sent_by_our_own_app(tmp_path: Path) -> None:
    code = (
        "import django; django.setup();"
        "from appliance.capacity.tasks import run_capacity; print(run_capacity.app.main)"
    )
    assert run_python(tmp_path, "-c", code).stdout.strip() == "Blockhouse".lower()
