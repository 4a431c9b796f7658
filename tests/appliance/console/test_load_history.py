"""The plotted numbers: one sample a second, minutes kept by the server, hours by the worker."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.test import AsyncClient

from appliance.accounts.models import User
from appliance.console import load_history as history
from appliance.console.feed import ConsoleFeed
from appliance.console.host_load import HostLoad
from appliance.console.models import LoadRow
from appliance.console.samples import COLUMNS, FRESH_PAGE_SAMPLES, KEEP_SAMPLES, Samples, merged
from appliance.console.tasks import roll_up_load
from tests.appliance.console.simulated_backend import SimulatedBackend

NOON = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def state(decode: float = 10.0, preemptions: int = 0, ttft: float | None = 0.5) -> dict[str, Any]:
    return {
        "decode_tokens_per_s": decode,
        "ttft_s": {"p50": ttft, "p95": ttft},
        "totals": {"preemptions": preemptions},
        "waiting": 1,
        "kv": {"blocks_used": 25, "blocks_total": 100},
        "host": {"cpu_percent": 40.0, "memory_bytes": 2**30, "gpu_percent": None},
    }


def sample(t: float, decode: float, ttft_p95: float | None = None) -> list[float | None]:
    row: list[float | None] = [t, *[None] * (len(COLUMNS) - 1)]
    row[COLUMNS.index("decode")], row[COLUMNS.index("ttft_p95")] = decode, ttft_p95
    return row


def value(row: list[float | None], name: str) -> float | None:
    return row[COLUMNS.index(name)]


def test_a_sample_a_second_is_kept_for_an_hour_and_a_fresh_page_gets_a_quarter() -> None:
    samples = Samples()
    for look in range(KEEP_SAMPLES * 2 + 200):
        samples.observe(state(), look * 0.5, look)
    assert len(samples.since(0.0)) == KEEP_SAMPLES
    fresh = samples.delta_since(-1)
    assert len(fresh) == FRESH_PAGE_SAMPLES
    assert fresh == samples.since(0.0)[-FRESH_PAGE_SAMPLES:]


def test_a_sample_has_the_machines_load_and_the_preemptions_of_the_last_minute() -> None:
    samples = Samples()
    rows = [samples.observe(state(preemptions=n), float(n), n) for n in range(90)]
    last = rows[-1]
    assert last is not None
    assert (value(last, "cpu"), value(last, "memory"), value(last, "gpu")) == (40.0, 1.0, None)
    assert value(last, "kv") == 25.0
    assert value(last, "preempted") == 60.0
    # An engine that was loaded anew counts from zero.
    again = samples.observe(state(preemptions=0), 91.0, 91)
    assert again is not None
    assert value(again, "preempted") == 0.0


def test_several_samples_become_their_mean_and_the_worst_of_what_people_look_for() -> None:
    row = merged([sample(1, 10, 0.4), sample(2, 30, None), sample(3, 20, 1.9)], 60.0)
    assert (row[0], value(row, "decode"), value(row, "ttft_p95")) == (60.0, 20.0, 1.9)
    assert value(row, "waiting") is None


def test_a_minute_of_the_wall_clock_becomes_one_row() -> None:
    epoch = NOON.timestamp() + 50
    maker = history.MinuteMaker(epoch)
    ended = [row for t in range(75) if (row := maker.take(sample(float(t), float(t))))]
    assert [at for at, _ in ended] == [NOON, NOON + timedelta(minutes=1)]
    assert value(ended[0][1], "decode") == 4.5
    assert value(ended[1][1], "decode") == sum(range(10, 70)) / 60


def minutes(begin: datetime, number: int, decode: float = 1.0) -> None:
    for minute in range(number):
        history.minute_save(begin + timedelta(minutes=minute), sample(0.0, decode))


@pytest.mark.django_db
def test_d06_hours_are_made_once_however_often_the_task_runs() -> None:
    minutes(NOON - timedelta(hours=2), 60, 4.0)
    minutes(NOON - timedelta(hours=1), 60, 8.0)
    minutes(NOON, 5)
    late = NOON + timedelta(minutes=5)
    assert history.hours_make(late) == 2
    # A minute that was written late goes into the hour at the next run.
    minutes(NOON - timedelta(hours=1), 30, 2.0)
    history.hours_make(late)
    hours = LoadRow.objects.filter(span_s=3600).order_by("at")
    assert [row.at for row in hours] == [NOON - timedelta(hours=2), NOON - timedelta(hours=1)]
    assert [row.values["decode"] for row in hours] == [4.0, 5.0]


@pytest.mark.django_db
def test_a_worker_that_was_away_for_a_day_catches_up_and_old_rows_go() -> None:
    for hours_ago in range(30):
        minutes(NOON - timedelta(hours=hours_ago + 1), 2)
    minutes(NOON - timedelta(hours=60), 2)
    assert history.hours_make(NOON) == 31
    assert history.old_rows_delete(NOON) == 2
    assert LoadRow.objects.filter(span_s=60).count() == 60
    assert history.old_rows_delete(NOON + timedelta(days=36)) == 60 + 31
    assert not LoadRow.objects.exists()


@pytest.mark.django_db
def test_the_workers_task_rolls_up_and_prunes() -> None:
    minutes(NOON - timedelta(days=400), 3)
    roll_up_load()
    assert not LoadRow.objects.exists()


@pytest.mark.django_db
@pytest.mark.parametrize(("name", "number"), [("1h", 60), ("24h", 12), ("7d", 1)])
def test_a_longer_time_is_drawn_from_what_is_stored_after_a_restart(name: str, number: int) -> None:
    minutes(NOON - timedelta(hours=1), 60, 3.0)
    rows = history.points(name, history.stored_rows(name, NOON), Samples(), NOON.timestamp())
    assert len(rows) == number
    assert {value(row, "decode") for row in rows} == {3.0}
    assert rows[0][0] == (NOON - timedelta(hours=1)).timestamp()


@pytest.mark.django_db
def test_what_this_process_saw_goes_before_what_is_stored_of_the_same_time() -> None:
    minutes(NOON - timedelta(hours=1), 60, 3.0)
    epoch = (NOON - timedelta(minutes=10)).timestamp()
    live = Samples()
    for second in range(600):
        live.observe(state(decode=9.0), float(second), second)
    rows = history.points("1h", history.stored_rows("1h", NOON), live, epoch)
    assert [value(row, "decode") for row in rows] == [3.0] * 50 + [9.0] * 60


async def test_the_page_gets_each_range_and_other_words_are_told(
    alice: User, bob: User, engine: SimulatedBackend, feed: ConsoleFeed
) -> None:
    await feed.look()
    client = AsyncClient()
    await client.aforce_login(alice)
    for name in history.RANGES:
        told = (await client.get("/console/load/", {"range": name})).json()
        assert told["columns"] == list(COLUMNS)
        assert len(told["rows"]) == 1
    bad = await client.get("/console/load/", {"range": "1y"})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "range")
    await client.aforce_login(bob)
    assert (await client.get("/console/load/", {"range": "1h"})).status_code == 403


async def test_the_feed_keeps_each_minute_and_lives_on_without_the_database(
    alice: User, engine: SimulatedBackend, feed: ConsoleFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    await feed.look()
    at = datetime.fromtimestamp(feed.epoch // 60 * 60, UTC)
    monkeypatch.setattr(feed, "_started", feed._started - 60.0)
    await feed.look()
    assert [row.at async for row in LoadRow.objects.all()] == [at]
    # The table is gone: nothing is kept, and the consoles go on.
    from django.db import OperationalError

    def broken(*_: Any) -> None:
        raise OperationalError("the database is away")

    monkeypatch.setattr("appliance.console.feed.minute_save", broken)
    monkeypatch.setattr(feed, "_started", feed._started - 60.0)
    tick = feed.picture.tick
    await feed.look()
    assert feed.picture.tick == tick + 1
    assert await sync_to_async(LoadRow.objects.count)() == 1


def test_the_machines_load_is_read_and_a_gpu_only_where_one_serves() -> None:
    load = HostLoad().read({"model": {"device": "cpu"}})
    assert load["cpu_percent"] is not None
    assert 0 < (load["memory_bytes"] or 0) < (load["memory_total_bytes"] or 0)
    assert load["gpu_memory_bytes"] is None


def test_a_gpu_that_cannot_be_asked_is_no_figure_and_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pynvml

    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    load = HostLoad()
    for _ in range(3):
        assert load.read({"model": {"device": "cuda:0 NVIDIA H200"}})["gpu_percent"] is None
    assert len(caplog.records) == 1
