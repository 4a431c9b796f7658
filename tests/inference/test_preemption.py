"""Running out of blocks: who makes room, and that nothing is lost by it."""

import pytest

from inference.request import FinishReason, RequestClass, RequestStatus
from inference.scheduling.waiting import WaitingRequests
from tests.inference.helpers import Harness, expected_output, make_request


def assert_undisturbed(*requests):
    for request in requests:
        n = len(request.output_token_ids)
        assert request.output_token_ids == expected_output(request.prompt_token_ids, n)


def test_two_growing_requests_both_finish_in_full():
    """A10: a pool of 2,048 tokens, two of 300 + 1,500; a third joins later."""
    harness = Harness(num_blocks=128, check_every=50)
    first, second = make_request(300, 1500), make_request(300, 1500)
    harness.add(first, second)
    for _ in range(100):
        harness.step()
    third = make_request(300, 1000)
    harness.add(third)
    harness.run()
    for request, length in ((first, 1500), (second, 1500), (third, 1000)):
        assert request.finish_reason is FinishReason.LENGTH
        assert request.finish_detail == "max_tokens"
        assert len(request.output_token_ids) == length
    assert_undisturbed(first, second, third)
    # They do not keep throwing each other out.
    assert 0 < harness.num_preempted <= 8


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_a_preempted_request_goes_on_where_it_was(enable_prefix_cache):
    harness = Harness(num_blocks=8, enable_prefix_cache=enable_prefix_cache)
    requests = [make_request(30, 60) for _ in range(3)]
    harness.add(*requests)
    harness.run()
    assert harness.num_preempted > 0
    assert_undisturbed(*requests)
    assert all(len(request.output_token_ids) == 60 for request in requests)


def test_the_lowest_class_makes_room_first():
    harness = Harness(num_blocks=8)
    background = make_request(30, 60, request_class=RequestClass.BACKGROUND)
    harness.add(background)
    harness.step()
    chat = make_request(30, 60, request_class=RequestClass.INTERACTIVE)
    harness.add(chat)
    harness.run()
    assert background.num_preemptions > 0
    assert chat.num_preemptions == 0
    assert_undisturbed(background, chat)


def test_among_equals_the_most_recent_makes_room():
    harness = Harness(num_blocks=8)
    old, new = make_request(30, 60), make_request(30, 60)
    harness.add(old)
    harness.step()
    harness.add(new)
    harness.run()
    assert old.num_preemptions == 0
    assert new.num_preemptions > 0


def test_a_preempted_request_starts_again_before_new_ones_of_its_class():
    harness = Harness(num_blocks=8, slots=2)
    old, new = make_request(30, 60), make_request(30, 60)
    harness.add(old, new)
    while not new.num_preemptions:
        harness.step()
    late = make_request(4, 1)
    harness.add(late)
    harness.run()
    assert late.first_scheduled_s >= old.finished_s
    assert harness.ended.index(late) > harness.ended.index(old)


def test_nobody_is_started_in_a_step_that_preempts():
    harness = Harness(num_blocks=8, slots=3)
    harness.add(make_request(30, 60), make_request(30, 60))
    while not harness.num_preempted:
        started = len(harness.started)
        before = harness.num_preempted
        harness.add(make_request(2, 1))
        harness.step()
        if harness.num_preempted > before:
            assert len(harness.started) == started


def test_a_preempted_request_can_be_aborted():
    """A01."""
    harness = Harness(num_blocks=8)
    old, new = make_request(30, 60), make_request(30, 60)
    harness.add(old, new)
    while not new.num_preemptions:
        harness.step()
    assert harness.scheduler.finish(new.request_id, FinishReason.ABORT, None, 0.0) is new
    harness.run()
    assert new.finish_reason is FinishReason.ABORT
    assert harness.kv.pool.num_available == 8


def test_a_prompt_takes_a_part_of_its_chunk_rather_than_preempting():
    harness = Harness(num_blocks=8, slots=2, admission_headroom=0.0)
    talking = make_request(30, 34)
    harness.add(talking)
    harness.step()
    harness.add(make_request(60, 2))
    harness.run()
    assert harness.num_preempted == 0


def test_contiguous_reservation_admits_only_what_it_can_reserve():
    harness = Harness(num_blocks=64, reserve_tokens=512)
    requests = [make_request(10, 5) for _ in range(4)]
    harness.add(*requests)
    harness.step()
    # Two reservations fill the pool; growth room is kept for the first.
    assert len(harness.scheduler.running) == 1
    assert harness.kv.pool.num_used == 32
    harness.run()
    assert_undisturbed(*requests)


def test_headroom_keeps_a_share_of_the_pool_free_at_admission():
    harness = Harness(num_blocks=64, admission_headroom=0.5)
    harness.add(*(make_request(160, 4) for _ in range(6)))
    harness.step()
    assert harness.kv.pool.num_used == 30


def test_a_cap_per_owner_does_not_hold_back_what_was_already_started():
    harness = Harness(num_blocks=8)
    old, new = make_request(30, 60), make_request(30, 60)
    harness.add(old, new)
    while not new.num_preemptions:
        harness.step()
    harness.tune(max_running_per_owner=1)
    harness.run()
    assert_undisturbed(old, new)
    assert len(new.output_token_ids) == 60


def test_one_preempted_again_waits_once_though_it_passed_another_at_its_cap():
    waiting = WaitingRequests()
    first, second = make_request(8), make_request(8, owner="bob")
    for admission, request in enumerate((first, second)):
        request.set_status(RequestStatus.RUNNING)
        request.set_status(RequestStatus.PREEMPTED)
        waiting.put_back(request, admission, 0.0)
    waiting.park(first.owner)
    assert waiting.peek(0.0, 100.0) is second
    waiting.start(second, 0.0, 0.0)
    second.set_status(RequestStatus.RUNNING)
    second.set_status(RequestStatus.PREEMPTED)
    waiting.put_back(second, 1, 1.0)
    assert waiting.order(10) == [first, second]


@pytest.mark.parametrize("speculation", ["off", "on"])
def test_a_reservation_set_while_answers_grow_leaves_none_without_its_block(speculation):
    """More than the pool has left: they grow on by what they need, never past their blocks."""
    harness = Harness(num_blocks=14, speculation=speculation)
    requests = [make_request([7, 8, 9] * 10, 60) for _ in range(2)]
    harness.add(*requests)
    for _ in range(3):
        harness.step()
    harness.tune(reserve_tokens=150)
    harness.run()
    assert_undisturbed(*requests)
    assert all(len(request.output_token_ids) == 60 for request in requests)
