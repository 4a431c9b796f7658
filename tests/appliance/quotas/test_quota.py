"""Members cannot use more tokens a day than their quota allows, and lose none they did not use."""

from datetime import UTC, date, datetime, timedelta
from importlib import import_module

import pytest
from django.utils import timezone

from appliance.errors import QuotaExceeded
from appliance.quotas import services
from appliance.quotas.limits import month_resets_at, quota_day, quota_resets_at
from appliance.quotas.models import LimitRule, QuotaReservation, UsageRecord, UsageRollup
from appliance.quotas.rollup import usage_roll_up
from appliance.quotas.rules import limit_rule_save
from appliance.quotas.selectors import (
    allowances,
    member_quotas,
    quota_status,
)
from appliance.quotas.services import (
    quota_heal,
    quota_mark_alive,
    quota_release,
    quota_reserve,
    quota_settle,
)
from tests.appliance.limits import tokens_a_day


def reserve(user, prompt=10, completion=30, **options):
    return quota_reserve(user.pk, prompt_tokens=prompt, completion_tokens=completion, **options)


def test_a_reservation_is_held_and_settled_to_the_true_count(bob, make_usage):
    tokens_a_day(None, 100)
    reservation = reserve(bob)
    status = quota_status(bob)
    assert (status.used_tokens, status.reserved_tokens, status.left_tokens) == (0, 40, 60)
    assert quota_settle(reservation, make_usage(10, 5))
    status = quota_status(bob)
    assert (status.used_tokens, status.reserved_tokens, status.left_tokens) == (15, 0, 85)
    record = UsageRecord.objects.get()
    assert (record.user, record.prompt_tokens, record.completion_tokens) == (bob, 10, 5)


def test_settling_twice_books_once(bob, make_usage):
    reservation = reserve(bob)
    assert quota_settle(reservation, make_usage())
    assert not quota_settle(reservation, make_usage())
    quota_release(reservation)
    assert UsageRecord.objects.count() == 1
    assert quota_status(bob).used_tokens == 15
    assert quota_status(bob).reserved_tokens == 0


def test_a_release_gives_everything_back_once(bob):
    reservation = reserve(bob)
    quota_release(reservation)
    quota_release(reservation)
    assert (quota_status(bob).used_tokens, quota_status(bob).reserved_tokens) == (0, 0)
    assert not QuotaReservation.objects.exists()


def test_an_answer_is_cut_to_what_is_left(bob):
    tokens_a_day(bob, 50)
    reservation = reserve(bob, prompt=20, completion=1000)
    assert reservation.completion_tokens == 30
    assert quota_status(bob).left_tokens == 0


def test_sixteen_answer_tokens_must_be_left(bob):
    tokens_a_day(bob, 36)
    with pytest.raises(QuotaExceeded):
        reserve(bob, prompt=21, completion=1000)
    assert reserve(bob, prompt=20, completion=1000).completion_tokens == 16


def test_a_short_answer_that_fits_needs_no_sixteen(bob):
    tokens_a_day(bob, 12)
    assert reserve(bob, prompt=10, completion=2).completion_tokens == 2


def test_the_refusal_says_numbers_and_a_wait_that_suffices_b10(bob, make_usage):
    tokens_a_day(bob, 100)
    quota_settle(reserve(bob, 50, 40), make_usage(50, 40))
    with pytest.raises(QuotaExceeded) as caught:
        reserve(bob, 10, 40)
    assert "100 tokens a day" in caught.value.message
    assert "90 used" in caught.value.message
    wait = timedelta(seconds=caught.value.retry_after_s)
    assert isinstance(caught.value.retry_after_s, int)
    assert timezone.now() + wait >= quota_resets_at(quota_day())


def test_what_no_day_allows_is_refused_without_a_wait(bob):
    tokens_a_day(bob, 100)
    with pytest.raises(QuotaExceeded) as caught:
        reserve(bob, 200, 10)
    assert caught.value.retry_after_s is None


def test_what_all_members_have_left_is_what_each_has(alice, bob, charlie):
    tokens_a_day(None, 100)
    limit_rule_save("tokens_per_day", 70, user=bob, by=None)
    limit_rule_save("requests_per_minute", 3, group=charlie.groups.get(), by=None)
    reserve(bob)
    found = member_quotas([alice, bob, charlie])
    for quota in found:
        assert quota.used_today == 0
        assert quota.allowances == allowances(quota.user.pk)
    assert [[each.left for each in quota.allowances] for quota in found] == [
        [100],
        [30],
        [3, 100],
    ]
    assert [quota.held_today for quota in found] == [0, 40, 0]


def test_the_month_is_told_where_it_leaves_less(bob, make_usage):
    tokens_a_day(bob, 100)
    assert (quota_status(bob).window, quota_status(bob).left_tokens) == ("day", 100)
    limit_rule_save("tokens_per_month", 90, by=None)
    quota_settle(reserve(bob), make_usage(10, 20))
    status = quota_status(bob)
    assert (status.window, status.limit_tokens, status.used_tokens) == ("month", 90, 30)
    assert (status.left_tokens, status.resets_at) == (60, month_resets_at(quota_day()))


def test_a_new_installation_starts_with_a_rule_for_everybody(db):
    LimitRule.objects.all().delete()
    import_module("appliance.quotas.migrations.0002_limit_rules").add_first_rule(LimitRule)
    rule = LimitRule.objects.get()
    assert (rule.limit, rule.value, rule.who) == ("tokens_per_day", 5_000_000, "everybody")


def test_a_limit_lowered_below_the_use_leaves_nothing(bob, make_usage):
    quota_settle(reserve(bob), make_usage())
    tokens_a_day(bob, 5)
    assert quota_status(bob).left_tokens == 0
    with pytest.raises(QuotaExceeded):
        reserve(bob, 1, 1)


def test_the_ledger_outlives_its_user(bob, make_usage):
    reservation = reserve(bob)
    bob.delete()
    assert quota_settle(reservation, make_usage())
    record = UsageRecord.objects.get()
    assert (record.user, record.username) == (None, "bob")


# ---- days


def test_the_day_is_the_teams_day(settings):
    settings.TIME_ZONE = "Pacific/Auckland"
    assert quota_day(datetime(2026, 3, 1, 10, 59, tzinfo=UTC)) == date(2026, 3, 1)
    assert quota_day(datetime(2026, 3, 1, 11, 0, tzinfo=UTC)) == date(2026, 3, 2)


@pytest.mark.parametrize(
    ("zone", "day", "hours"),
    [
        ("Europe/Prague", date(2026, 3, 29), 23),
        ("Europe/Prague", date(2026, 10, 25), 25),
        ("Europe/Prague", date(2026, 7, 1), 24),
        # Midnight of this day does not exist: the clocks go from 23:59:59 to 01:00.
        ("Africa/Cairo", date(2026, 4, 24), 23),
    ],
)
def test_days_follow_each_other_when_the_clocks_change(settings, zone, day, hours):
    settings.TIME_ZONE = zone
    start, end = quota_resets_at(day - timedelta(days=1)), quota_resets_at(day)
    assert end.astimezone(UTC) - start.astimezone(UTC) == timedelta(hours=hours)
    assert quota_day(end.astimezone(UTC)) == day + timedelta(days=1)
    assert quota_day(end.astimezone(UTC) - timedelta(seconds=1)) == day


def test_an_answer_over_midnight_is_charged_to_the_day_it_began(bob, make_usage, monkeypatch):
    reservation = reserve(bob)
    tomorrow = timezone.now() + timedelta(days=1)
    monkeypatch.setattr(timezone, "now", lambda: tomorrow)
    reserve(bob)
    quota_settle(reservation, make_usage(10, 5))
    assert quota_status(bob).reserved_tokens == 40
    assert UsageRecord.objects.get().day == reservation.day
    # The first request of the new day finds nothing used.
    assert quota_status(bob).used_tokens == 0


# ---- healing


def test_the_start_gives_back_what_a_crash_held_c09(bob, monkeypatch):
    reserve(bob)
    monkeypatch.setattr(services, "PROCESS_ID", services.uuid.uuid4())
    mine = reserve(bob)
    assert quota_heal(all_others=True) == 1
    assert quota_status(bob).reserved_tokens == mine.tokens
    assert quota_heal(all_others=True) == 0


def test_what_a_crash_cut_off_has_one_row_that_says_abort_c09(bob, monkeypatch):
    held = reserve(bob, key_prefix="bh_abcd", source="api", model="tiny")
    QuotaReservation.objects.update(alive_at=timezone.now() + timedelta(seconds=30))
    monkeypatch.setattr(services, "PROCESS_ID", services.uuid.uuid4())
    assert quota_heal(all_others=True) == 1
    quota_heal(all_others=True)
    row = UsageRecord.objects.get()
    assert (row.end, row.prompt_tokens, row.completion_tokens) == ("abort", 0, 0)
    assert (row.user, row.username, row.key_prefix) == (bob, "bob", "bh_abcd")
    assert (row.source, row.model, row.day, row.reservation_id) == (
        "api",
        "tiny",
        held.day,
        held.id,
    )
    assert 25 < row.duration_s < 35


def test_a_slow_process_that_was_taken_for_dead_corrects_its_row_and_the_sums_c09(
    bob, make_usage, monkeypatch
):
    held = reserve(bob, source="api")
    monkeypatch.setattr(services, "PROCESS_ID", services.uuid.uuid4())
    quota_heal(all_others=True)
    later = timezone.now() + timedelta(hours=3)
    monkeypatch.setattr(timezone, "now", lambda: later)
    usage_roll_up()
    assert quota_settle(held, make_usage(10, 5))
    assert not quota_settle(held, make_usage(10, 5))
    row = UsageRecord.objects.get()
    assert (row.end, row.prompt_tokens, row.completion_tokens) == ("stop", 10, 5)
    usage_roll_up()
    sums = UsageRollup.objects.filter(span=UsageRollup.Span.HOUR)
    assert [(each.num_requests, each.prompt_tokens) for each in sums] == [(1, 10)]


def test_the_task_gives_back_only_what_nobody_vouches_for_c09(bob, make_usage, monkeypatch):
    from appliance.quotas.tasks import heal_reservations

    here = services.PROCESS_ID
    reservation = reserve(bob)
    monkeypatch.setattr(services, "PROCESS_ID", services.uuid.uuid4())
    heal_reservations()
    assert quota_status(bob).reserved_tokens == reservation.tokens

    old = timezone.now() - timedelta(hours=1)
    QuotaReservation.objects.update(alive_at=old)
    monkeypatch.setattr(services, "PROCESS_ID", here)
    quota_mark_alive()
    monkeypatch.setattr(services, "PROCESS_ID", services.uuid.uuid4())
    heal_reservations()
    assert quota_status(bob).reserved_tokens == reservation.tokens

    QuotaReservation.objects.update(alive_at=old)
    heal_reservations()
    assert quota_status(bob).reserved_tokens == 0
    # The process was only slow: its answer is still booked, and nothing becomes negative.
    assert quota_settle(reservation, make_usage(10, 5))
    assert (quota_status(bob).used_tokens, quota_status(bob).reserved_tokens) == (15, 0)
