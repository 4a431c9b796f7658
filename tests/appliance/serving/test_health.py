"""Probes say whether the process can act and whether it is ready; busy is still ready (D09)."""

import httpx
import pytest
from channels.db import database_sync_to_async
from django.core.cache.backends.redis import RedisCache
from django.core.checks import run_checks
from django.db import OperationalError
from django.test import AsyncClient

from appliance.accounts.services import user_create
from appliance.api_keys.services import api_key_issue
from appliance.asgi import application
from appliance.chat import views as chat_views
from appliance.serving import checks, health, views
from appliance.serving.gateway import gateway_close, gateway_remove
from appliance.serving.health import STALL_S, Probe, StepWatch
from appliance.serving.services import generation_open
from tests.e2e.server import free_port

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def fresh_probes(monkeypatch):
    monkeypatch.setattr(health, "_watch", StepWatch())
    monkeypatch.setattr(health, "_database", Probe(health.ask_database))
    monkeypatch.setattr(health, "_redis", Probe(health.ask_redis))


@pytest.fixture
async def visitor():
    """Somebody who asks by IP address and has no account."""
    transport = httpx.ASGITransport(application)
    async with httpx.AsyncClient(transport=transport, base_url="http://10.1.2.3:8000") as client:
        yield client


def with_state(backend, monkeypatch, **changes):
    state = {**backend.state(), **changes}
    monkeypatch.setattr(backend, "state", lambda: state)


async def test_a_ready_server_answers_probes_by_ip_without_a_name_or_key_d09(backend, visitor):
    for path in ("/healthz", "/readyz"):
        answer = await visitor.get(path)
        assert (answer.status_code, answer.headers["cache-control"][:9]) == (200, "max-age=0")
        head = await visitor.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert (await visitor.post(path)).status_code in (403, 405)


async def test_a_busy_server_is_ready_d09(backend, visitor, ask):
    backend.hold(after=0)
    generations = [await generation_open(ask()) for _ in range(10)]
    assert (await visitor.get("/readyz")).status_code == 200
    for generation in generations:
        await generation.aclose()


async def test_while_loading_it_lives_and_says_how_far_it_is_d09(backend, visitor, monkeypatch):
    with_state(backend, monkeypatch, state="loading", progress=(0.25, "reading weights"))
    assert (await visitor.get("/healthz")).status_code == 200
    answer = await visitor.get("/readyz")
    assert answer.status_code == 503
    assert answer.json() == {"status": "loading", "progress": 0.25, "doing": "reading weights"}


@pytest.mark.parametrize("state", ["rebuilding", "swapping"])
async def test_a_model_that_is_loaded_again_or_changed_is_not_ready_and_alive_d09(
    backend, visitor, monkeypatch, state
):
    with_state(backend, monkeypatch, state=state, progress=(0.5, "reading weights"))
    assert (await visitor.get("/healthz")).status_code == 200
    answer = await visitor.get("/readyz")
    assert answer.status_code == 503
    assert answer.json() == {"status": state, "progress": 0.5, "doing": "reading weights"}


async def test_an_engine_that_hangs_is_not_ready_d09(backend, visitor, monkeypatch):
    with_state(backend, monkeypatch, state="hung", error="a step did not end")
    assert (await visitor.get("/healthz")).status_code == 200
    answer = await visitor.get("/readyz")
    assert (answer.status_code, answer.json()) == (503, {"status": "hung"})


async def test_a_dead_engine_is_neither_alive_nor_ready_d09(backend, visitor, monkeypatch):
    with_state(backend, monkeypatch, state="dead", error="secret path /home/x")
    for path in ("/healthz", "/readyz"):
        answer = await visitor.get(path)
        assert answer.status_code == 503
        assert answer.json() == {"status": "dead"}


async def test_a_stopping_server_lives_and_is_not_ready_d08(backend, visitor):
    gateway_close()
    assert (await visitor.get("/healthz")).status_code == 200
    answer = await visitor.get("/readyz")
    assert (answer.status_code, answer.json()["status"]) == (503, "stopping")


async def test_without_a_back_end_it_is_not_ready(visitor):
    gateway_remove()
    assert (await visitor.get("/healthz")).status_code == 200
    assert (await visitor.get("/readyz")).json() == {"status": "absent"}


async def test_without_a_database_it_is_not_ready_d09(backend, visitor, monkeypatch):
    def gone():
        raise OperationalError("server closed the connection")

    monkeypatch.setattr(health, "_query", gone)
    assert (await visitor.get("/healthz")).status_code == 200
    answer = await visitor.get("/readyz")
    assert (answer.status_code, answer.json()) == (503, {"status": "database"})


async def test_with_a_full_disk_it_lives_and_is_not_ready_until_there_is_room_d12(
    backend, visitor, monkeypatch
):
    # Another database has a disk of its own.
    told = (503, "disk") if health.connection.vendor == "sqlite" else (200, "ready")
    with monkeypatch.context() as patch:
        patch.setattr(health, "LEAST_FREE_BYTES", 2**62)
        assert (await visitor.get("/healthz")).status_code == 200
        answer = await visitor.get("/readyz")
        assert (answer.status_code, answer.json()["status"]) == told
    assert (await visitor.get("/readyz")).status_code == 200


async def test_a_page_that_meets_a_full_disk_says_so_d12(backend, bob, monkeypatch, caplog):
    def full(*args, **kwargs):
        raise OperationalError("database or disk is full")

    client = AsyncClient(raise_request_exception=False)
    await client.aforce_login(bob)
    monkeypatch.setattr(chat_views, "conversation_list", full)
    answer = await client.get("/")
    assert answer.status_code == 503
    assert "database" in answer.content.decode()
    assert not any(record.exc_info for record in caplog.records)


async def test_a_page_that_fails_otherwise_is_500_and_in_the_log(backend, bob, monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise RuntimeError("a fault of ours")

    client = AsyncClient(raise_request_exception=False)
    await client.aforce_login(bob)
    monkeypatch.setattr(chat_views, "conversation_list", broken)
    answer = await client.get("/")
    assert answer.status_code == 500
    assert "a fault of ours" not in answer.content.decode()
    assert "a fault of ours" in caplog.text


async def test_without_its_redis_it_is_not_ready_d09(backend, visitor, settings, monkeypatch):
    monkeypatch.setattr(health, "cache", RedisCache(f"redis://127.0.0.1:{free_port()}/0", {}))
    settings.REDIS_URL = ""
    assert (await visitor.get("/readyz")).status_code == 200
    monkeypatch.setattr(health, "_redis", Probe(health.ask_redis))
    settings.REDIS_URL = "redis://set"
    assert (await visitor.get("/healthz")).status_code == 200
    answer = await visitor.get("/readyz")
    assert (answer.status_code, answer.json()) == (503, {"status": "redis"})


async def test_a_database_that_hangs_is_not_waited_for_long_d09(backend, visitor, monkeypatch):
    import threading

    leave = threading.Event()
    monkeypatch.setattr(health, "_ANSWER_WAIT_S", 0.05)
    monkeypatch.setattr(health, "_query", lambda: leave.wait(30))
    asked = [(await visitor.get("/readyz")).status_code for _ in range(3)]
    leave.set()
    assert asked == [503, 503, 503]


async def test_many_probes_share_one_look_at_the_database_d09(backend, visitor, monkeypatch):
    looks = []
    monkeypatch.setattr(health, "_query", lambda: looks.append(1))
    monkeypatch.setattr(health, "_database", Probe(health.ask_database, clock=lambda: 1.0))
    for _ in range(20):
        assert (await visitor.get("/readyz")).status_code == 200
    assert len(looks) == 1


async def test_work_without_a_step_for_a_minute_is_a_stall_d09(backend, visitor, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(health, "_watch", StepWatch(clock=lambda: now[0]))
    with_state(backend, monkeypatch, running=1, step=7)
    assert (await visitor.get("/readyz")).status_code == 200
    now[0] += STALL_S + 1
    assert (await visitor.get("/readyz")).json() == {"status": "stalled"}
    with_state(backend, monkeypatch, running=1, step=8)
    assert (await visitor.get("/readyz")).status_code == 200


def test_idle_hours_are_no_stall_d09():
    now = [0.0]
    watch = StepWatch(clock=lambda: now[0])
    assert not watch.is_stalled(7, has_work=True)
    for has_work in (False, True):
        now[0] += 10_000
        assert not watch.is_stalled(7, has_work=has_work)


@database_sync_to_async
def make_admin_and_keys():
    alice = user_create("alice", is_admin=True)
    bob = user_create("bob")
    return (
        alice,
        bob,
        api_key_issue(alice, "monitor", ["admin"])[1],
        api_key_issue(alice, "script", ["chat"])[1],
    )


async def test_metrics_are_for_admins_only(backend):
    alice, bob, admin_key, chat_key = await make_admin_and_keys()
    client = AsyncClient()
    assert (await client.get("/metrics")).status_code == 401
    for key, status in ((admin_key, 200), (chat_key, 403), ("bh_wrong", 401)):
        headers = {"Authorization": f"Bearer {key}"}
        assert (await client.get("/metrics", headers=headers)).status_code == status
    await client.aforce_login(bob)
    assert (await client.get("/metrics")).status_code == 403
    await client.aforce_login(alice)
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert "blockhouse_slots 4.0" in answer.content.decode()
    bad = {"Authorization": "Bearer bh_wrong"}
    assert (await client.get("/metrics", headers=bad)).status_code == 401


async def test_metrics_say_in_json_that_the_database_takes_nothing(backend, monkeypatch):
    def refuse(*args, **kwargs):
        raise OperationalError("database is locked")

    monkeypatch.setattr(views, "api_key_authenticate", refuse)
    answer = await AsyncClient().get("/metrics", headers={"authorization": "Bearer bh_x"})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "storage_unavailable"


async def test_metrics_count_what_was_generated(backend, ask):
    from prometheus_client import generate_latest

    from appliance.serving.metrics import REGISTRY

    def completion_tokens():
        return REGISTRY.get_sample_value("blockhouse_tokens_total", {"kind": "completion"}) or 0

    before = completion_tokens()
    async for _ in await generation_open(ask()):
        pass
    assert completion_tokens() - before == 5
    assert b"blockhouse_time_to_first_token_seconds_count" in generate_latest(REGISTRY)


class Distribution:
    def __init__(self, name):
        self.metadata = {"Name": name}


def test_distributions_with_our_names_stop_the_start(monkeypatch):
    monkeypatch.setattr(checks, "distributions", lambda: map(Distribution, ["Kernels", "torch"]))
    errors = run_checks(tags=["serving"])
    assert [error.id for error in errors] == ["serving.E001"]
    assert "pip uninstall kernels" in errors[0].hint


def test_a_data_folder_that_cannot_be_written_stops_the_start(settings, tmp_path):
    settings.DATA_DIR = tmp_path / "missing"
    assert [error.id for error in run_checks(tags=["serving"])] == ["serving.E002"]


def test_a_misspelt_setting_stops_the_start(monkeypatch):
    monkeypatch.setenv("APPLIANCE_DEVISE", "cuda")
    (error,) = run_checks(tags=["serving"])
    assert error.id == "serving.E003"
    assert error.hint == "Did you mean APPLIANCE_DEVICE?"


async def test_probes_that_fail_do_not_fill_the_log(backend, visitor, caplog):
    gateway_close()
    assert (await visitor.get("/readyz")).status_code == 503
    assert "readyz" not in caplog.text
