"""The capacity test's page: every state, starting, stopping, comparing, exporting."""

import csv
import io
from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError, transaction
from django.test import Client
from django.utils import timezone

from appliance.accounts.models import User
from appliance.api_keys.models import ApiKey
from appliance.capacity.models import CapacityLevel, CapacityRun
from appliance.capacity.plan import Plan
from appliance.capacity.recommend import Limits
from appliance.capacity.services import key_issue, run_claim, run_end, run_progress, runs_heal
from appliance.console.audit import audit_words
from appliance.console.models import AuditRecord
from appliance.serving.gateway import gateway_remove
from tests.appliance.capacity.test_recommend import MEASURED
from tests.appliance.fake_backend import FakeBackend

URL = "/console/capacity/"
FORM = {
    "mix": "chat",
    "levels": "4, 1,2",
    "ttft": "2.0",
    "itl": "35",
    "speed": "",
    "level_s": "15",
    "guard": "on",
    "raise_slots": "on",
}
PLAN = Plan(levels=(1, 2, 4, 8, 16), limits=Limits(ttft_p95_s=2.0, itl_p95_s=0.035))
Status = CapacityRun.Status

pytestmark = pytest.mark.usefixtures("backend")


def make_run(by: User, status: str = Status.DONE, levels: Any = MEASURED, **known: Any) -> Any:
    run = CapacityRun.objects.create(
        started_by=by,
        started_by_name=by.username,
        plan=PLAN.as_dict(),
        facts={"median_prompt": 200, "median_answer": 128, "model": "scripted"},
        status=status,
        is_open=status in (Status.QUEUED, Status.RUNNING),
        **known,
    )
    for level in levels:
        CapacityLevel.objects.create(run=run, users=level.users, figures=level.as_dict())
    return run


def html(client: Client, query: str = "") -> str:
    response = client.get(URL + query)
    assert response.status_code == 200
    text = response.content.decode()
    assert "style=" not in text
    return text


def acts() -> list[str]:
    return [audit_words(record) for record in AuditRecord.objects.all()]


def test_only_admins_see_and_do(alice: User, bob: User) -> None:
    run = make_run(alice)
    client = Client(headers={"host": "localhost"})
    pages = (URL, f"{URL}{run.pk}/status/", f"{URL}{run.pk}/figures.csv")
    posts = (f"{URL}start/", f"{URL}{run.pk}/stop/")
    assert {client.get(page).status_code for page in pages} == {302}
    assert {client.post(post).status_code for post in posts} == {302}
    client.force_login(bob)
    assert {client.get(page).status_code for page in pages} == {403}
    assert {client.post(post, FORM).status_code for post in posts} == {403}


def test_before_the_first_test_the_page_says_what_it_is_for(admin: Client) -> None:
    text = html(admin)
    assert "No test has run yet" in text
    assert 'id="apply"' not in text


def test_the_form_starts_as_the_newest_test_was_asked_for(admin: Client, alice: User) -> None:
    make_run(alice)
    page = html(admin)
    assert 'name="levels" value="1, 2, 4, 8, 16"' in page
    assert 'name="itl" value="35"' in page


def test_without_an_engine_the_page_still_shows_results(admin: Client, alice: User) -> None:
    make_run(alice)
    gateway_remove()
    assert "Set slots to 12" in html(admin)


def test_starting_hands_the_checked_plan_to_the_worker(
    admin: Client, alice: User, asked: list[int]
) -> None:
    response = admin.post(f"{URL}start/", FORM)
    assert response.status_code == 302
    run = CapacityRun.objects.get()
    assert asked == [run.pk]
    plan = Plan.from_dict(run.plan)
    assert tuple(plan.levels) == (1, 2, 4)
    assert plan.limits == Limits(ttft_p95_s=2.0, itl_p95_s=0.035)
    assert (plan.is_low_priority, plan.raises_slots, plan.guard_s) == (False, True, 5.0)
    assert acts() == [f"Started capacity test {run.pk} with 1, 2, 4 at the same time"]
    text = html(admin)
    assert "Waiting for the worker" in text
    assert "One at a time" in text


def test_a_second_test_is_refused_while_one_runs(
    admin: Client, alice: User, asked: list[int]
) -> None:
    make_run(alice, Status.RUNNING, ())
    response = admin.post(f"{URL}start/", FORM)
    assert response.status_code == 409
    assert "A test is running" in response.content.decode()
    assert asked == []
    with pytest.raises(IntegrityError), transaction.atomic():
        make_run(alice, Status.QUEUED, ())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("levels", "1,two"),
        ("levels", ""),
        ("levels", "1" * 90),
        ("ttft", "-1"),
        ("ttft", "nan"),
        ("itl", "inf"),
        ("mix", "team"),
        ("mix", "<b>"),
        ("level_s", "100000"),
    ],
)
def test_a_wrong_field_is_told_beside_it_and_nothing_starts(
    admin: Client, asked: list[int], field: str, value: str
) -> None:
    response = admin.post(f"{URL}start/", {**FORM, field: value})
    assert response.status_code == 400
    assert 'class="field-error"' in response.content.decode()
    assert not CapacityRun.objects.exists()
    assert asked == []


def test_a_done_test_shows_the_advice_every_level_and_the_knee(admin: Client, alice: User) -> None:
    make_run(alice)
    text = html(admin)
    assert "Set slots to 12" in text
    assert "You run 4 now." in text
    assert 'data-slots="12"' in text
    assert text.count("too slow</span>") == 1
    assert '"knee": 8' in text
    assert "2.9 s" in text


@pytest.mark.parametrize(
    ("status", "title"),
    [(Status.STOPPED, "The test was stopped"), (Status.FAILED, "The test failed")],
)
def test_what_was_measured_until_a_stop_is_kept_but_not_applied(
    admin: Client, alice: User, status: str, title: str
) -> None:
    make_run(alice, status, MEASURED[:2], reason="The server was stopped.")
    text = html(admin)
    assert title in text
    assert "The server was stopped." in text
    assert "What was measured until then" in text
    assert 'id="apply"' not in text


def test_fewer_slots_than_now_are_not_offered_while_more_may_be_as_good(
    admin: Client, alice: User
) -> None:
    make_run(alice, levels=MEASURED[:2])
    text = html(admin)
    assert "Good up to 2" in text
    assert 'id="apply"' not in text


def test_two_tests_are_compared_level_by_level(admin: Client, alice: User) -> None:
    old = make_run(alice, levels=MEASURED[:3])
    new = make_run(alice, levels=MEASURED[1:])
    response = admin.get(f"{URL}?run={new.pk}&with={old.pk}")
    rows = {row["users"]: row for row in response.context["compared"]}
    assert sorted(rows) == [1, 2, 4, 8, 12, 16]
    assert rows[1]["speed"] == ["–", "84"]
    assert rows[4]["change"] == "same"
    assert 'id="chart-other"' in response.content.decode()
    # Nonsense in the address shows the newest.
    assert "Set slots to" in html(admin, "?run=x&with=9999")


def test_export_as_csv_and_json(admin: Client, alice: User) -> None:
    run = make_run(alice)
    response = admin.get(f"{URL}{run.pk}/figures.csv")
    rows = list(csv.DictReader(io.StringIO(response.content.decode())))
    assert [row["users"] for row in rows] == ["1", "2", "4", "8", "12", "16"]
    assert [row["is_good"] for row in rows] == ["True"] * 5 + ["False"]
    told = admin.get(f"{URL}{run.pk}/figures.json").json()
    assert told["recommended_users"] == 12
    assert told["levels"][0]["tokens_per_s"] == 84
    assert admin.get(f"{URL}999/figures.json").status_code == 404


def test_stopping_before_the_worker_took_it_ends_it_at_once(admin: Client, alice: User) -> None:
    run = make_run(alice, Status.QUEUED, ())
    admin.post(f"{URL}{run.pk}/stop/")
    run.refresh_from_db()
    assert (run.status, run.is_open, run.reason) == (Status.STOPPED, False, "alice stopped it.")
    assert run_claim(run.pk) is None


def test_stopping_a_running_one_reaches_the_worker(admin: Client, alice: User) -> None:
    run = make_run(alice, Status.RUNNING, ())
    assert run_progress(run.pk, {"users": 1}) is None
    admin.post(f"{URL}{run.pk}/stop/")
    assert run_progress(run.pk, {"users": 1}) == "alice stopped it."
    admin.post(f"{URL}{run.pk}/stop/")
    assert acts() == [f"Stopped capacity test {run.pk}"], "asked for twice is one act"
    assert admin.get(f"{URL}{run.pk}/status/").json()["is_stopping"] is True


def test_d06_a_test_whose_worker_died_is_failed_and_its_key_revoked(
    admin: Client, alice: User
) -> None:
    key, _ = key_issue(alice, is_low_priority=True)
    long_ago = timezone.now() - timedelta(minutes=1)
    run = make_run(alice, Status.RUNNING, MEASURED[:2], alive_at=long_ago, key_id=key.pk)
    assert admin.get(f"{URL}{run.pk}/status/").json()["is_open"] is False
    assert "The background worker ended in the middle of it." in html(admin)
    assert not ApiKey.objects.get(pk=key.pk).is_live
    # The worker was only slow after all: it learns that it was given up, and changes nothing.
    assert run_progress(run.pk, {}) is not None
    run_end(run.pk, Status.DONE)
    run.refresh_from_db()
    assert run.status == Status.FAILED


def test_d06_a_task_delivered_twice_runs_once(alice: User) -> None:
    run = make_run(alice, Status.QUEUED, ())
    assert run_claim(run.pk) is not None
    assert run_claim(run.pk) is None


def test_a_test_that_no_worker_takes_is_said_and_then_given_up(admin: Client, alice: User) -> None:
    run = make_run(alice, Status.QUEUED, (), created_at=timezone.now() - timedelta(seconds=20))
    assert admin.get(f"{URL}{run.pk}/status/").json()["is_left"] is True
    assert "has not taken the test yet" in html(admin)
    CapacityRun.objects.update(created_at=timezone.now() - timedelta(minutes=3))
    runs_heal()
    assert "No background worker took it up." in html(admin)


def test_a_queue_that_does_not_answer_is_an_error_not_a_test_for_ever(
    admin: Client, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    from appliance.capacity.tasks import run_capacity

    def refuse(run_id: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(run_capacity, "delay", refuse)
    response = admin.post(f"{URL}start/", FORM)
    assert response.status_code == 503
    assert "the task queue does not answer" in response.content.decode()
    assert not CapacityRun.objects.filter(is_open=True).exists()
