"""Rules for everybody, a group, a user and a key: the tightest decides, and the answer names it."""

from datetime import UTC, datetime, timedelta

import pytest
from django.db import IntegrityError, transaction
from django.utils import timezone

from appliance.api_keys.services import api_key_issue
from appliance.console.audit import audit_words
from appliance.console.models import AuditRecord
from appliance.errors import BadRequest, QuotaExceeded, RateLimited
from appliance.quotas.limits import LIMIT_KINDS, month_resets_at
from appliance.quotas.models import LimitRule, Meter
from appliance.quotas.rules import limit_rule_delete, limit_rule_save, limits_of
from appliance.quotas.selectors import allowances
from appliance.quotas.services import quota_release, quota_reserve, quota_settle

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def no_rules(db):
    LimitRule.objects.all().delete()


@pytest.fixture
def clock(monkeypatch):
    """Time that stands still until a test moves it: 20 s past a full minute."""

    class Clock:
        now = datetime(2026, 10, 25, 10, 30, 20, tzinfo=UTC)

        def move(self, **by):
            self.now += timedelta(**by)

    clock = Clock()
    monkeypatch.setattr(timezone, "now", lambda: clock.now)
    return clock


def reserve(user, prompt=10, completion=30, **options):
    return quota_reserve(user.pk, prompt_tokens=prompt, completion_tokens=completion, **options)


def refusal(user, **options):
    with pytest.raises((RateLimited, QuotaExceeded)) as caught:
        reserve(user, **options)
    return caught.value


def test_the_tightest_of_all_that_fit_decides_and_is_named(bob, charlie, clock):
    group = charlie.groups.get()
    key, _ = api_key_issue(charlie, "nightly")
    limit_rule_save("tokens_per_day", 1000, by=None)
    limit_rule_save("tokens_per_day", 500, group=group, by=None)
    limit_rule_save("tokens_per_day", 300, user=charlie, by=None)
    limit_rule_save("tokens_per_day", 100, key=key, by=None)
    assert [limit.value for limit in limits_of(bob.pk)] == [1000]
    assert [limit.value for limit in limits_of(charlie.pk)] == [300, 500, 1000]
    assert [limit.value for limit in limits_of(charlie.pk, key.pk)] == [100, 300, 500, 1000]

    reserve(charlie, 10, 70, key_id=key.pk)
    assert "rule for the key “nightly”" in refusal(charlie, prompt=20, key_id=key.pk).message
    # Without the key the user's own rule holds, which counts what the key took.
    reserve(charlie, 10, 190)
    assert "rule for charlie" in refusal(charlie, prompt=20).message
    limit_rule_delete(LimitRule.objects.get(user=charlie), by=None)
    reserve(charlie, 10, 190)
    assert "rule for the group “other team”" in refusal(charlie, prompt=20).message
    # A rule for a group counts each member alone.
    reserve(bob, 10, 900)


def test_a_looser_rule_of_ones_own_opens_nothing(bob):
    limit_rule_save("tokens_per_day", 100, by=None)
    limit_rule_save("tokens_per_day", 10_000, user=bob, by=None)
    assert "rule for everybody" in refusal(bob, prompt=200).message


def test_requests_a_minute_start_anew_with_the_minute_b10(bob, clock):
    limit_rule_save("requests_per_minute", 2, user=bob, wait_s=30, by=None)
    reserve(bob)
    reserve(bob)
    refused = refusal(bob)
    assert refused.code == "rate_limit_exceeded"
    assert refused.max_wait_s == 30
    assert "2 requests a minute (rule for bob)" in refused.message
    assert "starts anew at 10:31 (UTC)" in refused.message
    clock.move(seconds=refused.retry_after_s)
    reserve(bob)


def test_a_request_that_never_began_is_not_counted(bob, clock):
    limit_rule_save("requests_per_minute", 1, user=bob, by=None)
    quota_release(reserve(bob))
    quota_release(reserve(bob))
    reserve(bob)
    refusal(bob)


def test_tokens_a_minute_do_not_cut_what_the_next_minute_allows(bob, clock, make_usage):
    limit_rule_save("tokens_per_minute", 100, by=None)
    held = reserve(bob, 10, 60)
    # 30 are left of this minute: an answer of 60 waits for the next instead of being cut to 20.
    assert isinstance(refusal(bob, prompt=10, completion=60), RateLimited)
    quota_settle(held, make_usage(10, 10))
    assert reserve(bob, 10, 60).completion_tokens == 60
    clock.move(minutes=1)
    # More than a whole minute allows is cut to a whole minute.
    assert reserve(bob, 10, 5000).completion_tokens == 90
    assert isinstance(refusal(bob, prompt=10, completion=5), RateLimited)
    never = refusal(bob, prompt=99, completion=30)
    assert (never.code, never.retry_after_s) == ("insufficient_quota", None)


def test_tokens_a_month_go_over_the_days_of_the_month(bob, clock, make_usage, settings):
    settings.TIME_ZONE = "Europe/Prague"
    limit_rule_save("tokens_per_month", 100, by=None)
    quota_settle(reserve(bob), make_usage(10, 70))
    clock.move(days=2)
    refused = refusal(bob, prompt=10)
    assert "starts anew on 01 Nov at 00:00 (CET)" in refused.message
    clock.move(seconds=refused.retry_after_s)
    assert reserve(bob).completion_tokens == 30


@pytest.mark.parametrize(
    ("zone", "first", "hours"),
    [
        # The clocks go forward, and back, within the month.
        ("Europe/Prague", datetime(2026, 3, 1), 31 * 24 - 1),
        ("Europe/Prague", datetime(2026, 10, 1), 31 * 24 + 1),
        ("America/New_York", datetime(2026, 12, 1), 31 * 24),
    ],
)
def test_months_follow_each_other_when_the_clocks_change(settings, zone, first, hours):
    settings.TIME_ZONE = zone
    begin = month_resets_at((first - timedelta(days=1)).date())
    end = month_resets_at(first.date())
    assert end.astimezone(UTC) - begin.astimezone(UTC) == timedelta(hours=hours)
    assert month_resets_at(first.date() + timedelta(days=20)) == end


def test_what_was_used_counts_for_a_rule_that_comes_later(bob, clock, make_usage):
    key, _ = api_key_issue(bob, "script")
    quota_settle(reserve(bob, key_id=key.pk), make_usage(10, 20))
    limit_rule_save("tokens_per_day", 35, key=key, by=None)
    [allowance] = allowances(bob.pk, key.pk)
    assert (allowance.used, allowance.left) == (30, 5)
    refusal(bob, key_id=key.pk)
    reserve(bob)


def test_an_answer_that_ends_in_a_later_minute_frees_nothing_there(bob, clock, make_usage):
    limit_rule_save("tokens_per_minute", 100, by=None)
    first = reserve(bob, 10, 60)
    clock.move(minutes=1)
    second = reserve(bob, 10, 60)
    quota_settle(first, make_usage(10, 10))
    [allowance] = allowances(bob.pk)
    assert (allowance.used, allowance.reserved) == (0, 70)
    quota_settle(second, make_usage(10, 10))
    assert allowances(bob.pk)[0].left == 80


def test_a_clock_that_is_set_back_opens_no_minute_again(bob, clock):
    limit_rule_save("requests_per_minute", 1, by=None)
    reserve(bob)
    clock.move(seconds=-30)
    refused = refusal(bob)
    clock.move(seconds=30)
    assert refused.retry_after_s <= 61
    # One that was years ahead must not lock anybody out for years.
    Meter.objects.update(minute=clock.now + timedelta(days=900), day="2029-01-01")
    reserve(bob)


@pytest.mark.parametrize(
    ("limit", "value", "wait_s"),
    [
        ("tokens_per_day", -1, 0),
        ("tokens_per_day", True, 0),
        ("tokens_per_day", 1.5, 0),
        ("tokens_per_day", "5", 0),
        ("tokens_per_day", 10**30, 0),
        ("slot_share", 0, 0),
        ("slot_share", 101, 0),
        ("context_tokens", 0, 0),
        ("words_per_day", 5, 0),
        ("tokens_per_day", 5, 10),
        ("tokens_per_minute", 5, 100_000),
        ("tokens_per_minute", 5, -1),
    ],
)
def test_odd_rules_are_refused(bob, limit, value, wait_s):
    with pytest.raises(BadRequest):
        limit_rule_save(limit, value, user=bob, wait_s=wait_s, by=None)
    assert not LimitRule.objects.exists()


def test_a_subject_has_one_rule_of_a_kind(alice, bob):
    for subject in ({}, {"user": bob}):
        limit_rule_save("tokens_per_day", 1, by=alice, **subject)
        limit_rule_save("tokens_per_day", 2, by=alice, **subject)
        assert LimitRule.objects.get(user=subject.get("user")).value == 2
        with pytest.raises(IntegrityError), transaction.atomic():
            LimitRule.objects.create(limit="tokens_per_day", value=3, **subject)


def test_each_change_is_on_record(alice, bob):
    limit_rule_save("requests_per_minute", 20, user=bob, wait_s=30, by=alice)
    rule = limit_rule_save("requests_per_minute", 10, user=bob, by=alice)
    limit_rule_save("requests_per_minute", 10, user=bob, by=alice)
    limit_rule_delete(rule, by=alice)
    assert [audit_words(record) for record in AuditRecord.objects.order_by("pk")] == [
        "Made a rule for bob: Requests a minute no limit → 20; Wait in seconds none → 30",
        "Changed the rule for bob: Requests a minute 20 → 10; Wait in seconds 30 → 0",
        "Deleted the rule for bob: Requests a minute 10 → no limit",
    ]


def test_rules_go_with_their_group_user_and_key(bob, charlie):
    key, _ = api_key_issue(bob, "script")
    group = charlie.groups.get()
    for subject in ({"user": bob}, {"key": key}, {"group": group}):
        limit_rule_save("tokens_per_day", 5, by=None, **subject)
    reserve(charlie, 1, 1)
    bob.delete()
    group.delete()
    assert not LimitRule.objects.exists()


def test_one_is_called_one():
    assert LIMIT_KINDS["requests_per_minute"].words(1) == "1 request a minute"
    assert LIMIT_KINDS["tokens_per_day"].words(1) == "1 token a day"
    assert LIMIT_KINDS["slot_share"].words(25) == "25 % of the slots"
