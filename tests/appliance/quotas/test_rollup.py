"""The sum of the roll-ups is the sum of the rows, however often and late they are made (D06)."""

import uuid
from datetime import UTC, datetime, timedelta

import pytest
from django.db.models import Count, Sum
from django.db.models.functions import TruncHour
from django.utils import timezone
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from appliance.accounts.services import user_create
from appliance.quotas.limits import quota_day
from appliance.quotas.models import RollupState, UsageRecord, UsageRollup
from appliance.quotas.rollup import usage_roll_up
from appliance.quotas.tasks import roll_up_usage
from appliance.quotas.usage import tokens_of_keys, usage_hours, usage_parts

pytestmark = pytest.mark.django_db

DIMENSIONS = ("user_id", "username", "key_id", "key_prefix", "source", "model")


@pytest.fixture
def clock(monkeypatch):
    now = [datetime(2026, 3, 28, 22, 50, tzinfo=UTC)]
    monkeypatch.setattr(timezone, "now", lambda: now[0])
    return now


def book(user=None, prompt=10, completion=5, *, name="bob", key=None, source="api", days_ago=0):
    return UsageRecord.objects.create(
        reservation_id=uuid.uuid4(),
        request_id="r-1",
        user=user,
        username=name,
        key_id=key,
        key_prefix=f"bh_{key}" if key else "",
        source=source,
        model="small" if prompt % 2 else "large",
        prompt_tokens=prompt,
        cached_tokens=prompt // 2,
        completion_tokens=completion,
        queue_s=0,
        duration_s=1,
        end="stop",
        day=quota_day() - timedelta(days=days_ago),
    )


def of_rows(when):
    rows = UsageRecord.objects.annotate(hour=TruncHour("created_at", tzinfo=UTC))
    return sums(rows.values(when, *DIMENSIONS).annotate(num=Count("pk")), when)


def of_rollups(span, when):
    rows = UsageRollup.objects.filter(span=span)
    return sums(rows.values(when, *DIMENSIONS).annotate(num=Sum("num_requests")), when)


def sums(rows, when):
    rows = rows.annotate(
        prompt=Sum("prompt_tokens"), cached=Sum("cached_tokens"), answer=Sum("completion_tokens")
    ).order_by()
    names = (when, *DIMENSIONS)
    return {
        tuple(row[name] for name in names): (
            row["num"],
            row["prompt"],
            row["cached"],
            row["answer"],
        )
        for row in rows
    }


def check():
    assert of_rollups("day", "day") == of_rows("day")
    assert of_rollups("hour", "hour") == of_rows("hour")


bookings = st.fixed_dictionaries(
    {
        "prompt": st.integers(0, 5000),
        "completion": st.integers(0, 5000),
        "name": st.sampled_from(["bob", "ann"]),
        "key": st.sampled_from([None, 3, 4]),
        "source": st.sampled_from(["chat", "api", "capacity"]),
        # An answer over midnight, and one whose booking had to wait for the database.
        "days_ago": st.sampled_from([0, 0, 0, 1, 9]),
    }
)
acts = st.one_of(
    bookings,
    st.just("roll up"),
    st.integers(1, 80 * 60).map(lambda minutes: timedelta(minutes=minutes)),
)


@hypothesis_settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(acts, max_size=25))
def test_the_sums_are_those_of_the_rows_d06(clock, things):
    for model in (UsageRecord, UsageRollup, RollupState):
        model.objects.all().delete()
    num_rows = 0
    for thing in things:
        if isinstance(thing, dict):
            book(**thing)
            num_rows += 1
        elif isinstance(thing, timedelta):
            clock[0] += thing
        else:
            usage_roll_up()
            check()
    usage_roll_up()
    check()
    before = sorted(UsageRollup.objects.values_list("span", "hour", "day", "num_requests"), key=str)
    usage_roll_up()
    after = sorted(UsageRollup.objects.values_list("span", "hour", "day", "num_requests"), key=str)
    assert before == after
    # Nothing is counted twice or lost at the border between roll-ups and rows.
    parts = usage_parts(days=4000)
    assert sum(part.num_requests for part in parts) == num_rows
    total = UsageRecord.objects.aggregate(n=Sum("prompt_tokens") + Sum("completion_tokens"))["n"]
    assert sum(part.tokens for part in parts) == (total or 0)
    hours = usage_hours(hours=5000)
    assert sum(part.num_requests for part in hours) == num_rows
    clock[0] += timedelta(days=3)
    usage_roll_up()
    assert sum(part.num_requests for part in usage_parts(days=4000)) == num_rows


def test_after_a_standstill_one_run_catches_up(clock):
    book()
    roll_up_usage()
    for _ in range(5):
        clock[0] += timedelta(days=1)
        book()
    roll_up_usage()
    check()
    assert UsageRollup.objects.filter(span="day").count() == 6


def test_what_was_booked_during_a_run_is_in_the_next(clock):
    """Its time is before the run's end, and it was committed after the run had looked."""
    began = clock[0]
    usage_roll_up()
    clock[0] = began - timedelta(minutes=2)
    book()
    clock[0] = began + timedelta(minutes=10)
    usage_roll_up()
    check()


def test_old_days_are_read_from_few_rows_and_young_ones_from_the_ledger(clock):
    for _ in range(3):
        book()
    clock[0] += timedelta(days=3)
    usage_roll_up()
    book(prompt=100)
    # Nothing of the old days is asked of the ledger any more.
    UsageRecord.objects.filter(prompt_tokens=10).delete()
    today, old = usage_parts()
    assert (today.num_requests, today.prompt_tokens) == (1, 100)
    assert (old.num_requests, old.prompt_tokens, old.completion_tokens) == (3, 30, 15)


def test_usage_outlives_its_user_and_is_read_for_one(clock):
    bob, ann = user_create("bob"), user_create("ann")
    book(bob, key=3)
    book(ann, name="ann")
    clock[0] += timedelta(days=3)
    usage_roll_up()
    book(bob, prompt=20, key=3)
    assert [part.prompt_tokens for part in usage_parts(bob)] == [20, 10]
    assert tokens_of_keys([3, 4]) == {3: 40}
    bob.delete()
    assert {part.username for part in usage_parts()} == {"bob", "ann"}


def test_hours_are_read_on_both_sides_of_the_border(clock):
    for _ in range(6):
        book()
        clock[0] += timedelta(hours=1)
    usage_roll_up()
    book()
    hours = usage_hours(hours=24)
    assert [part.num_requests for part in hours] == [1] * 7
    assert hours[0].hour == datetime(2026, 3, 29, 4, 0, tzinfo=UTC)
    assert len(usage_hours(hours=3)) == 3


def test_old_rows_go_when_asked_and_their_sums_stay(clock, settings):
    for days in (0, 30, 40):
        clock[0] += timedelta(days=days)
        book()
    sums_before = of_rows("day")
    usage_roll_up()
    assert UsageRecord.objects.count() == 3
    # What pages read from the ledger itself is never touched.
    settings.APPLIANCE_LEDGER_DAYS = 1
    usage_roll_up()
    assert UsageRecord.objects.count() == 2
    usage_roll_up()
    assert of_rollups("day", "day") == sums_before
    assert sum(part.num_requests for part in usage_parts(days=360)) == 3
