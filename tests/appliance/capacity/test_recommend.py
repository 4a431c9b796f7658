"""The advice, from recorded figures: no clock, no server."""

from typing import Any

import pytest

from appliance.capacity.figures import Level
from appliance.capacity.recommend import Limits, advise, faults, finer_level, knee


def level(users: int, ttft: float | None, itl: float, speed: float, **known: Any) -> Level:
    return Level(
        users=users,
        requests=40,
        errors=known.pop("errors", 0),
        measured_s=60.0,
        ttft_p50_s=ttft,
        ttft_p95_s=ttft,
        itl_p50_s=itl,
        itl_p95_s=itl,
        tokens_per_s=speed,
        user_tokens_per_s=speed / users,
        prompt_tokens=4000,
        completion_tokens=9000,
        **known,
    )


MEASURED = [
    level(1, 0.21, 0.013, 84),
    level(2, 0.24, 0.014, 160),
    level(4, 0.33, 0.015, 292),
    level(8, 0.62, 0.020, 486),
    level(12, 1.10, 0.026, 588),
    level(16, 2.90, 0.041, 622),
]
LIMITS = Limits(ttft_p95_s=2.0, itl_p95_s=0.035)


def test_names_the_highest_level_that_is_good_and_why_the_next_fails() -> None:
    advice = advise(MEASURED, LIMITS, slots_now=8)
    assert (advice.users, advice.fails_at) == (12, 16)
    assert advice.title == "Set slots to 12"
    assert advice.text == (
        "The most this server can do with every answer still good: 588 tok/s in all. At 16 the "
        "first token takes 2.9 s (limit 2.0 s) and the next token takes 41 ms (limit 35 ms), for "
        "6 % more speed. You run 8 now."
    )


@pytest.mark.parametrize("at", range(1, 6))
def test_a_known_knee_is_found(at: int) -> None:
    """Work grows with the users up to 2**at, and not at all after it."""
    levels = [level(n, 0.1, 0.01, 50.0 * min(n, 2**at)) for n in (1, 2, 4, 8, 16, 32, 64)]
    assert knee(levels) == 2**at


def test_the_order_of_the_levels_does_not_matter() -> None:
    assert advise(MEASURED[::-1], LIMITS) == advise(MEASURED, LIMITS)


def test_a_level_above_one_that_fails_is_not_trusted() -> None:
    lucky = [*MEASURED, level(32, 0.2, 0.01, 900)]
    assert advise(lucky, LIMITS).users == 12


def test_requests_that_fail_make_a_level_bad_whatever_its_speed() -> None:
    broken = level(2, 0.1, 0.01, 500, errors=3, first_error="HTTP 503: the queue is full")
    advice = advise([MEASURED[0], broken], LIMITS)
    assert (advice.users, advice.fails_at) == (1, 2)
    assert advice.reasons == ("3 of 40 requests failed (HTTP 503: the queue is full)",)


def test_each_limit_counts_alone_and_equality_is_still_good() -> None:
    one = level(4, 1.0, 0.05, 40)
    assert faults(one, Limits(ttft_p95_s=1.0, itl_p95_s=0.05, user_tokens_per_s=10.0)) == {}
    assert set(faults(one, Limits(ttft_p95_s=0.9, itl_p95_s=None))) == {"ttft_p95_s"}
    assert set(faults(one, Limits(ttft_p95_s=None, itl_p95_s=0.04))) == {"itl_p95_s"}
    assert set(faults(one, Limits(user_tokens_per_s=10.1))) == {"user_tokens_per_s"}
    silent = level(4, None, 0.01, 0)
    assert faults(silent, Limits())["ttft_p95_s"] == "the first token never comes (limit 2.0 s)"


def test_when_nothing_is_good_or_all_is_good_it_says_what_to_do() -> None:
    slow = advise([level(1, 9.0, 0.2, 3)], LIMITS)
    assert (slow.users, slow.fails_at, slow.title) == (None, 1, "Too slow even at 1")
    quick = advise(MEASURED[:3], LIMITS, slots_now=4)
    assert (quick.users, quick.fails_at, quick.title) == (4, None, "Keep 4 slots")
    assert "test with more than 4" in quick.text
    assert "The most" not in quick.text
    assert advise(MEASURED[:3], LIMITS, slots_now=128).title == "Good up to 4"
    assert advise(MEASURED[:3], LIMITS).title == "Good up to 4"
    assert advise(MEASURED[:3], LIMITS, slots_now=2).title == "Set slots to 4"
    assert advise([], LIMITS).users is None


def test_a_finer_level_is_asked_for_only_where_there_is_one() -> None:
    coarse = [one for one in MEASURED if one.users != 12]
    assert finer_level(coarse, LIMITS) == 12
    assert finer_level(MEASURED, LIMITS) == 14
    assert finer_level(MEASURED[:3], LIMITS) is None
    assert finer_level([level(1, 9, 0.2, 3)], LIMITS) is None
    assert finer_level([MEASURED[0], level(2, 9, 0.2, 3)], LIMITS) is None


def test_figures_survive_storage() -> None:
    assert Level.from_dict({**MEASURED[0].as_dict(), "of a later version": 1}) == MEASURED[0]
