"""Requests at the same instant cannot pass a quota together, on a real database file (C09, D04)."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection, transaction
from django.utils import timezone

from appliance.accounts.models import User
from appliance.accounts.services import user_create
from appliance.api_keys.services import api_key_issue
from appliance.errors import QuotaExceeded, RateLimited
from appliance.quotas.models import Meter, UsageRecord
from appliance.quotas.rules import limit_rule_save
from appliance.quotas.selectors import quota_status
from appliance.quotas.services import quota_release, quota_reserve, quota_settle
from tests.appliance.limits import only_limit, tokens_a_day

pytestmark = pytest.mark.django_db(transaction=True)
# Each has a connection of its own, and PostgreSQL is started with 50.
NUM_THREADS = 50 if connection.vendor == "sqlite" else 40


def in_threads(work, items):
    """Run `work` for all items, begun at the same instant, each on its own connection."""
    barrier = threading.Barrier(len(items))

    def run(item):
        try:
            barrier.wait(timeout=30)
            return work(item)
        finally:
            connection.close()

    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(run, items))


def try_reserve(user_id):
    try:
        return quota_reserve(user_id, prompt_tokens=10, completion_tokens=90)
    except QuotaExceeded:
        return None


def test_of_many_at_once_only_those_that_fit_get_in_c09(make_usage):
    bob = user_create("bob")
    tokens_a_day(bob, 300)
    reservations = in_threads(try_reserve, [bob.pk] * NUM_THREADS)
    got = [reservation for reservation in reservations if reservation]
    assert len(got) == 3
    assert quota_status(bob).reserved_tokens == 300

    quota_release(got[0])
    quota_settle(got[1], make_usage(10, 20))
    quota_settle(got[2], make_usage(10, 0, end="abort"))
    status = quota_status(bob)
    assert (status.used_tokens, status.reserved_tokens) == (40, 0)


def test_many_at_once_wait_for_a_long_write_and_lose_nothing_d04(make_usage):
    users = [user_create(f"user-{number}") for number in range(5)]
    bookings = [users[number % 5].pk for number in range(NUM_THREADS)]
    started = threading.Semaphore(0)
    finished = []

    def book(user_id):
        started.release()
        reservation = quota_reserve(user_id, prompt_tokens=10, completion_tokens=20)
        finished.append(quota_settle(reservation, make_usage(10, 5)))

    with transaction.atomic():  # a script that holds the database for itself
        User.objects.filter(pk=users[0].pk).update(first_name="held")
        threads = [
            threading.Thread(target=in_threads, args=(book, [user_id])) for user_id in bookings
        ]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert started.acquire(timeout=30)
        if connection.vendor == "sqlite":
            assert finished == []
    for thread in threads:
        thread.join(timeout=60)
    assert finished == [True] * NUM_THREADS
    assert UsageRecord.objects.count() == NUM_THREADS
    for meter in Meter.objects.all():
        assert (meter.day_used, meter.month_used) == (15 * NUM_THREADS // 5,) * 2
        assert (meter.day_reserved, meter.minute_reserved, meter.month_reserved) == (0, 0, 0)


def test_settle_and_release_at_the_same_instant_book_once(make_usage):
    bob = user_create("bob")
    reservation = quota_reserve(bob.pk, prompt_tokens=10, completion_tokens=20)

    def end(number):
        if number % 2:
            return quota_settle(reservation, make_usage(10, 5))
        return quota_release(reservation)

    results = in_threads(end, list(range(10)))
    assert results.count(True) == 1
    assert (quota_status(bob).used_tokens, quota_status(bob).reserved_tokens) == (15, 0)


def test_two_hundred_at_once_never_pass_a_quota_c09(make_usage):
    """Each settles what it took; then the next may come in, and never more than fits."""
    bob = user_create("bob")
    key, _ = api_key_issue(bob, "script")
    tokens_a_day(bob, 1000)
    limit_rule_save("tokens_per_day", 600, key=key, by=None)
    rounds = 200 // NUM_THREADS

    def ask(number):
        booked = 0
        for _ in range(rounds):
            try:
                held = quota_reserve(bob.pk, key_id=key.pk, prompt_tokens=10, completion_tokens=90)
            except QuotaExceeded:
                continue
            left = quota_status(bob)
            assert left.used_tokens + left.reserved_tokens <= 600
            if number % 3 == 0:
                quota_release(held)
            else:
                quota_settle(held, make_usage(10, 20, request_id=f"r-{number}"))
                booked += 30
        return booked

    booked = sum(in_threads(ask, list(range(NUM_THREADS))))
    status = quota_status(bob)
    assert (status.used_tokens, status.reserved_tokens) == (booked, 0)
    assert 500 < booked <= 600
    meter = Meter.objects.get(key=key)
    assert (meter.day_used, meter.day_reserved) == (booked, 0)
    assert UsageRecord.objects.count() == booked // 30


def test_of_many_at_once_a_minute_takes_its_requests_only(monkeypatch):
    bob = user_create("bob")
    # The minute stands still.
    now = timezone.now()
    monkeypatch.setattr(timezone, "now", lambda: now)
    only_limit("requests_per_minute", 7, user=bob)

    def ask(number):
        try:
            return quota_reserve(bob.pk, prompt_tokens=1, completion_tokens=1)
        except RateLimited:
            return None

    got = [each for each in in_threads(ask, list(range(NUM_THREADS))) if each]
    assert len(got) == 7
