"""The team's own lengths come from the ledger: no text, no tests, one week."""

import uuid
from datetime import timedelta

import pytest
from django.utils import timezone

from appliance.accounts.models import User
from appliance.capacity.mix import TEAM
from appliance.capacity.selectors import LEAST_TEAM_ANSWERS, mix_named, queue_times, team_mix
from appliance.errors import BadRequest
from appliance.quotas.models import UsageRecord


def book(user: User, number: int, prompt: int, answer: int, *, source: str = "chat") -> None:
    for _ in range(number):
        UsageRecord.objects.create(
            reservation_id=uuid.uuid4(),
            request_id="r",
            user=user,
            username=user.username,
            key_id=7,
            source=source,
            model="scripted",
            prompt_tokens=prompt,
            cached_tokens=0,
            completion_tokens=answer,
            queue_s=0.25,
            duration_s=1.0,
            end="stop",
            day=timezone.localdate(),
        )


def test_the_teams_lengths_without_those_of_tests(bob: User) -> None:
    book(bob, LEAST_TEAM_ANSWERS, 1840, 310)
    book(bob, 500, 5, 5, source="capacity")
    book(bob, 500, 9, 0)
    mix = team_mix()
    assert mix is not None
    assert len(mix.lengths) == LEAST_TEAM_ANSWERS
    assert (mix.median_prompt, mix.median_answer) == (1840, 310)
    assert team_mix(timezone.now() + timedelta(days=8)) is None


def test_too_few_answers_are_no_basis(bob: User) -> None:
    book(bob, LEAST_TEAM_ANSWERS - 1, 100, 100)
    assert team_mix() is None
    with pytest.raises(BadRequest, match="too few to go by"):
        mix_named(TEAM)
    with pytest.raises(BadRequest, match="no kind of request"):
        mix_named("<nonsense>")


def test_waits_are_those_of_the_tests_own_key(bob: User) -> None:
    begin = timezone.now().timestamp() - 1
    book(bob, 3, 10, 10, source="capacity")
    assert queue_times(7, begin) == [0.25] * 3
    assert queue_times(8, begin) == []
    assert queue_times(7, begin + 3600) == []
