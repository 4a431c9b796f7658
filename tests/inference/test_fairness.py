"""Fairness between owners: the virtual token counter, its bound, weights, caps, aging."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.engine import Engine
from inference.errors import PromptTooLong
from inference.request import FinishReason, RequestClass
from inference.scheduling.fair_queue import (
    OUTPUT_TOKEN_COST,
    PROMPT_TOKEN_COST,
    ClassShare,
    FairQueue,
)
from tests.inference.helpers import (
    FakeRunner,
    Harness,
    expected_output,
    fake_config,
    make_request,
)

NO_AGING = 86_400.0


def service(requests):
    """What its owner got so far, as the counter charges it."""
    return sum(
        PROMPT_TOKEN_COST * request.num_prompt_tokens * (request.first_scheduled_s is not None)
        + OUTPUT_TOKEN_COST * len(request.output_token_ids)
        for request in requests
    )


def test_a_flood_of_one_owner_does_not_hold_up_another():
    """A26: 200 queued requests of a script, then one of somebody else."""
    harness = Harness(slots=2)
    harness.add(*(make_request(8, 5, owner="flood") for _ in range(200)))
    for _ in range(10):
        harness.step()
    single = make_request(8, 5, owner="bob")
    harness.add(single)
    for _ in range(6):
        harness.step()
    assert single.first_scheduled_s is not None


def test_idle_time_saves_up_no_credit():
    harness = Harness(slots=1, aging_s=NO_AGING)
    steady = [make_request(8, 4, owner="steady") for _ in range(40)]
    harness.add(*steady)
    for _ in range(80):
        harness.step()
    # Served nothing for as long; were that a credit, the next ten starts would all be its own.
    late = [make_request(8, 4, owner="late") for _ in range(10)]
    harness.add(*late)
    before = sum(request.first_scheduled_s is not None for request in steady)
    for _ in range(40):
        harness.step()
    starts = sum(request.first_scheduled_s is not None for request in late)
    others = sum(request.first_scheduled_s is not None for request in steady) - before
    assert abs(starts - others) <= 1


sizes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=20, max_size=40)


@settings(max_examples=15, deadline=None)
@given(sizes, sizes, st.sampled_from([1, 2, 4]), st.sampled_from([1.0, 2.0]))
def test_service_of_two_waiting_owners_never_differs_by_more_than_the_bound(
    first_sizes, second_sizes, slots, weight
):
    """As in arXiv:2401.00588: at most what one batch and one prompt can add."""
    harness = Harness(num_blocks=24, slots=slots, aging_s=NO_AGING, owner_weights={"first": weight})
    first = [make_request(p, n, owner="first") for p, n in first_sizes]
    second = [make_request(p, n, owner="second") for p, n in second_sizes]
    harness.add(*first, *second)
    bound = PROMPT_TOKEN_COST * 40 + OUTPUT_TOKEN_COST * 20 * slots

    def waits(requests):
        return any(request.first_scheduled_s is None for request in requests)

    while True:
        harness.step()
        if not (waits(first) and waits(second)):
            break
        difference = service(first) / weight - service(second)
        assert abs(difference) <= bound


def test_weight_two_gets_twice_the_service_under_load():
    harness = Harness(num_blocks=16, slots=4, aging_s=NO_AGING, owner_weights={"big": 2.0})
    big = [make_request(10, 10, owner="big") for _ in range(150)]
    small = [make_request(10, 10, owner="small") for _ in range(150)]
    harness.add(*big, *small)
    for _ in range(400):
        harness.step()
    assert service(big) / service(small) == pytest.approx(2.0, rel=0.1)


def test_cached_prompt_tokens_are_not_charged():
    harness = Harness(slots=1, aging_s=NO_AGING)
    prompt = list(range(100, 164))
    harness.add(make_request(prompt, 1, owner="alice"))
    harness.run()
    before = harness.scheduler.waiting.fair[RequestClass.API].account("alice").counter
    harness.add(make_request(prompt, 1, owner="alice"))
    harness.run()
    after = harness.scheduler.waiting.fair[RequestClass.API].account("alice").counter
    assert after - before == 16 * PROMPT_TOKEN_COST + OUTPUT_TOKEN_COST


def test_preemption_is_not_charged_again():
    harness = Harness(num_blocks=8, enable_prefix_cache=False, aging_s=NO_AGING)
    harness.add(make_request(30, 60, owner="a"), make_request(30, 60, owner="b"))
    harness.run()
    fair = harness.scheduler.waiting.fair[RequestClass.API]
    assert harness.num_preempted > 0
    assert fair.account("a").counter == fair.account("b").counter == 30 + 2 * 60


def test_an_owner_at_its_cap_of_running_requests_waits_for_its_own():
    harness = Harness(slots=4, max_running_per_owner=2)
    harness.add(*(make_request(4, 6, owner="script") for _ in range(6)))
    other = make_request(4, 6, owner="bob")
    harness.add(other)
    harness.step()
    owners = [run.request.owner for run in harness.scheduler.running]
    assert sorted(owners) == ["bob", "script", "script"]
    harness.run()
    assert len(harness.ended) == 7


def test_an_owner_at_its_cap_of_blocks_waits_but_is_never_shut_out():
    harness = Harness(slots=4, max_blocks_per_owner=6)
    large = make_request(90, 2, owner="script")
    harness.add(large, make_request(40, 2, owner="script"), make_request(40, 2, owner="script"))
    harness.step()
    assert harness.running_ids() == [large.request_id]
    harness.run()
    assert len(harness.ended) == 3


def test_lifting_a_cap_takes_effect_at_once():
    harness = Harness(slots=4, max_running_per_owner=1)
    harness.add(*(make_request(4, 20, owner="script") for _ in range(4)))
    harness.step()
    assert len(harness.scheduler.running) == 1
    harness.tune(max_running_per_owner=0)
    harness.step()
    assert len(harness.scheduler.running) == 4


def test_turns_lost_to_a_cap_are_no_credit_once_it_is_lifted():
    """Or a script that was held to one request for an hour would shut out all others after it."""
    harness = Harness(slots=2, aging_s=NO_AGING, max_running_per_owner=1)
    harness.add(*(make_request(10, 30, owner="script") for _ in range(40)))
    harness.step()
    for n in range(400):
        harness.add(make_request(40, 1, owner=f"user{n % 3}"))
    for _ in range(150):
        harness.step()
    num_before = len(harness.started)
    harness.tune(max_running_per_owner=0)
    for _ in range(150):
        harness.step()
    owners = [request.owner for request in harness.started[num_before : num_before + 12]]
    assert owners.count("script") <= 6


def test_an_owner_who_waited_the_aging_time_goes_next():
    """However many new owners come, each with less service than the one who waits."""
    harness = Harness(slots=1, aging_s=20.0)
    harness.add(*(make_request(30, 3, owner="old") for _ in range(2)))
    for _ in range(4):
        harness.step()
    patient = make_request(30, 3, owner="old")
    harness.add(patient)
    for n in range(60):
        harness.add(make_request(1, 1, owner=f"new{n}"))
    asked = harness.now_s
    while patient.first_scheduled_s is None:
        harness.step()
    assert patient.first_scheduled_s - asked <= 45.0


def test_requests_of_one_owner_start_in_order_of_arrival():
    harness = Harness(slots=1)
    requests = [make_request(4, 1) for _ in range(6)]
    harness.add(*requests)
    harness.run()
    assert harness.started == requests


def test_the_order_that_is_told_is_the_order_of_the_starts():
    harness = Harness(slots=1, aging_s=NO_AGING)
    for n in range(4):
        harness.add(make_request(5 + n, 1, owner="a"), make_request(20, 1, owner="b"))
    harness.add(make_request(3, 1, owner="c", request_class=RequestClass.INTERACTIVE))
    told = harness.scheduler.waiting.order(100)
    harness.run()
    # Output tokens, unknown beforehand, are alike here.
    assert told[0].request_class is RequestClass.INTERACTIVE
    assert told[:4] == harness.started[:4]


def test_accounts_of_owners_that_are_gone_are_dropped():
    queue = FairQueue(ClassShare())
    for n in range(9_000):
        request = make_request(1, 1, owner=f"owner{n}")
        queue.push(request, float(n))
        queue.start(request, 1.0, float(n)).num_running -= 1
    assert len(queue._accounts) <= 4096
    assert queue.num_waiting == 0


# ---- the cap of blocks holds while answers grow


def held_by(harness, owner):
    return sum(
        harness.kv.num_blocks_of(run.request.request_id)
        for run in harness.scheduler.running
        if run.request.owner == owner
    )


def test_growing_answers_of_one_user_never_hold_more_blocks_than_the_cap():
    harness = Harness(num_blocks=64, slots=6, max_blocks_per_owner=10)
    own = [make_request(40, 60, owner="alice") for _ in range(3)]
    other = make_request(40, 60, owner="bob")
    harness.add(*own, other)
    most = 0
    while harness.scheduler.has_unfinished():
        harness.step()
        most = max(most, held_by(harness, "alice"))
        assert harness.num_steps < 1000
    assert 7 <= most <= 10
    assert harness.num_preempted >= 1
    assert own[0].num_preemptions == 0, "the most recent one makes room"
    assert other.num_preemptions == 0, "nobody else does"
    for request in (*own, other):
        assert request.output_token_ids == expected_output(request.prompt_token_ids, 60)


def test_a_user_at_the_cap_with_a_preempted_request_holds_up_nobody_else():
    harness = Harness(num_blocks=64, slots=6, max_blocks_per_owner=8)
    own = [make_request(40, 80, owner="alice") for _ in range(2)]
    harness.add(*own)
    while not harness.num_preempted:
        harness.step()
    late = make_request(20, 5, owner="bob")
    harness.add(late)
    harness.step()
    assert late.request_id in harness.running_ids()
    assert own[1].request_id not in harness.running_ids()
    harness.run()
    assert own[1].num_preemptions == 1, "it starts again when there is room, not before"


def test_a_users_only_request_ends_at_the_cap_and_a_longer_prompt_is_refused_with_the_numbers():
    harness = Harness(num_blocks=64, slots=4, max_blocks_per_owner=4)
    answer = make_request(40, 300, owner="alice")
    harness.add(answer)
    harness.run()
    assert (answer.finish_reason, answer.num_tokens) == (FinishReason.LENGTH, 64)
    engine = Engine(fake_config(), FakeRunner())
    engine.load()
    engine.tune(max_blocks_per_owner=4)
    engine.step()
    with pytest.raises(PromptTooLong, match="100 tokens; at most 63"):
        engine.add_request(make_request(100, 5))
    engine.shutdown(0.0)
