"""The scheduler alone: token budget, slots, classes, ends. On a simulated clock, without torch."""

import pytest

from inference.request import FinishReason, RequestClass
from tests.inference.helpers import EOS, Harness, expected_output, make_request


def ids(requests):
    return [request.request_id for request in requests]


def serve(harness, replies):
    """Requests that answer with these numbers of tokens; returns (last step, busy share)."""
    requests = [make_request(4, n, ignore_eos=True) for n in replies]
    harness.add(*requests)
    busy, last_step = 0, 0
    while harness.scheduler.has_unfinished():
        last_step += 1
        busy += len(harness.step().scheduled)
    return last_step, busy


def test_continuous_batching_ends_the_founding_example_at_step_180_with_no_idle_slot():
    steps, busy = serve(Harness(num_blocks=256), [40, 180, 80, 120, 140, 100, 60])
    assert steps == 180
    assert busy == 4 * 180


def test_static_batching_ends_the_founding_example_at_step_320():
    steps, _ = serve(Harness(num_blocks=256, policy="static"), [40, 180, 80, 120, 140, 100, 60])
    assert steps == 320


def test_a_static_batch_keeps_58_percent_of_its_slot_steps_busy():
    steps, busy = serve(Harness(num_blocks=256, policy="static"), [40, 180, 80, 120])
    assert (busy, 4 * steps) == (420, 720)
    assert round(100 * busy / (4 * steps), 1) == 58.3


def test_a_static_batch_admits_nobody_before_all_of_it_ended():
    harness = Harness(policy="static", slots=2)
    short, long, late = make_request(4, 2), make_request(4, 6), make_request(4, 2)
    harness.add(short, long, late)
    for _ in range(6):
        harness.step()
        assert late.first_scheduled_s is None
    harness.step()
    assert late.first_scheduled_s is not None


def test_a_request_answers_as_if_it_were_alone():
    harness = Harness(max_num_batched_tokens=24)
    requests = [make_request(n, 20) for n in (3, 50, 16, 33)]
    harness.add(*requests)
    harness.run()
    for request in requests:
        assert request.output_token_ids == expected_output(request.prompt_token_ids, 20)
        assert request.finish_reason is FinishReason.LENGTH


def test_a_long_prompt_does_not_stop_those_that_decode():
    harness = Harness(max_num_batched_tokens=32, num_blocks=128)
    talking = [make_request(4, 40) for _ in range(3)]
    harness.add(*talking)
    harness.step()
    harness.add(make_request(1200, 4))
    for _ in range(30):
        output = harness.step()
        decoding = {
            part.request.request_id for part in output.scheduled if part.num_new_tokens == 1
        }
        assert decoding >= set(ids(talking))
        assert output.num_tokens == 32


def test_decodes_come_first_in_a_step():
    harness = Harness(max_num_batched_tokens=16)
    harness.add(make_request(4, 10))
    harness.step()
    harness.add(make_request(40, 4))
    output = harness.step()
    assert [part.num_new_tokens for part in output.scheduled] == [1, 15]
    assert [part.samples for part in output.scheduled] == [True, False]


def test_a_short_prompt_overtakes_a_long_one_that_still_moves_on():
    harness = Harness(max_num_batched_tokens=40, num_blocks=128)
    long = make_request(1000, 1)
    harness.add(long)
    harness.step()
    short = make_request(30, 1)
    harness.add(short)
    before = long.num_computed_tokens
    harness.step()
    assert short.output_token_ids
    assert long.num_computed_tokens == before + 10


def test_a_slot_is_kept_while_a_request_runs_and_the_lowest_is_given_next():
    harness = Harness(slots=3)
    first, second, third = (make_request(4, n) for n in (2, 9, 9))
    harness.add(first, second, third)
    harness.step()
    slots = {run.request: run.slot for run in harness.scheduler.running}
    assert sorted(slots.values()) == [0, 1, 2]
    harness.step()
    fourth = make_request(4, 9)
    harness.add(fourth)
    harness.step()
    after = {run.request: run.slot for run in harness.scheduler.running}
    assert after == {second: slots[second], third: slots[third], fourth: slots[first]}


def test_lowering_the_slots_ends_nobody_and_admits_nobody():
    harness = Harness(slots=4)
    running = [make_request(4, 12) for _ in range(4)]
    late = make_request(4, 2)
    harness.add(*running, late)
    harness.step()
    harness.tune(slots=1)
    for _ in range(11):
        assert len(harness.step().scheduled) == 4
    assert late.first_scheduled_s is None
    harness.run()
    assert all(len(request.output_token_ids) == 12 for request in running)
    assert late.finish_reason is FinishReason.LENGTH


def test_raising_the_slots_admits_at_the_next_step():
    harness = Harness(slots=1)
    harness.add(*(make_request(4, 20) for _ in range(4)))
    harness.step()
    harness.tune(slots=3)
    harness.step()
    assert len(harness.scheduler.running) == 3


def test_a_budget_below_what_runs_lets_all_take_turns():
    harness = Harness(slots=4)
    requests = [make_request(4, 12) for _ in range(4)]
    harness.add(*requests)
    harness.step()
    harness.tune(max_num_batched_tokens=2)
    for _ in range(10):
        harness.step()
    counts = [len(request.output_token_ids) for request in requests]
    assert min(counts) >= 5
    assert max(counts) - min(counts) <= 1


def test_a_prompt_moves_on_while_decodes_fill_the_whole_budget():
    harness = Harness(slots=4)
    harness.add(*(make_request(4, 50) for _ in range(3)))
    harness.step()
    harness.tune(max_num_batched_tokens=4)
    prompt = make_request(10, 1)
    harness.add(prompt)
    harness.step()
    harness.tune(max_num_batched_tokens=2)
    for _ in range(12):
        harness.step()
    assert prompt.output_token_ids


def test_interactive_requests_go_first():
    harness = Harness(slots=1)
    background = make_request(4, 2, request_class=RequestClass.BACKGROUND)
    api = make_request(4, 2, request_class=RequestClass.API)
    chat = make_request(4, 2, request_class=RequestClass.INTERACTIVE)
    harness.add(background, api, chat)
    harness.run()
    assert harness.started == [chat, api, background]


def test_reserved_slots_are_left_for_interactive_requests():
    harness = Harness(slots=3, reserved_interactive_slots=1)
    harness.add(*(make_request(4, 20) for _ in range(5)))
    harness.step()
    assert len(harness.scheduler.running) == 2
    chat = make_request(4, 20, request_class=RequestClass.INTERACTIVE)
    harness.add(chat)
    harness.step()
    assert chat.request_id in harness.running_ids()


def test_reserving_every_slot_still_leaves_one_for_the_others():
    harness = Harness(slots=2, reserved_interactive_slots=2)
    harness.add(make_request(4, 2))
    harness.run()
    assert harness.scheduler.limits.reserved.effective == 1
    assert harness.scheduler.limits.reserved.reason


def test_a_background_request_gets_a_turn_in_a_steady_stream_of_chats():
    harness = Harness(slots=1, aging_s=20.0)
    background = make_request(4, 1, request_class=RequestClass.BACKGROUND, owner="bob")
    harness.add(background)
    for _ in range(30):
        harness.add(make_request(4, 1, request_class=RequestClass.INTERACTIVE))
    while background.first_scheduled_s is None:
        harness.step()
    assert 20.0 <= background.first_scheduled_s <= 22.0


def test_a_waiting_class_gets_one_turn_an_aging_time_and_not_more():
    harness = Harness(slots=1, aging_s=10.0)
    old = [make_request(4, 1, request_class=RequestClass.BACKGROUND) for _ in range(20)]
    harness.add(*old)
    harness.add(*(make_request(4, 1, request_class=RequestClass.INTERACTIVE) for _ in range(60)))
    for _ in range(40):
        harness.step()
    assert 3 <= sum(request.first_scheduled_s is not None for request in old) <= 4


@pytest.mark.parametrize(
    ("script", "params", "reason", "detail", "length"),
    [
        ([5, EOS], {}, FinishReason.STOP, None, 2),
        (
            [5, EOS, 6, 7],
            {"ignore_eos": True, "max_tokens": 4},
            FinishReason.LENGTH,
            "max_tokens",
            4,
        ),
        ([5, 77], {"stop_token_ids": (77,)}, FinishReason.STOP, "77", 2),
        ([77, EOS, 77], {"stop_token_ids": (77,), "min_tokens": 3}, FinishReason.STOP, "77", 3),
        ([5, 6, 7], {"max_tokens": 1}, FinishReason.LENGTH, "max_tokens", 1),
    ],
)
def test_a_request_ends_by_its_rules(script, params, reason, detail, length):
    request = make_request(4, **{"max_tokens": 8, **params})
    harness = Harness(script={request.request_id: script})
    harness.add(request)
    harness.run()
    assert (request.finish_reason, request.finish_detail) == (reason, detail)
    assert len(request.output_token_ids) == length


@pytest.mark.parametrize("max_tokens", [None, 500])
def test_a_request_ends_at_the_end_of_the_context(max_tokens):
    """A09, A11: it ends with `length`, and never hangs."""
    harness = Harness(num_blocks=64, max_len=64)
    request = make_request(60, max_tokens)
    harness.add(request)
    harness.run()
    assert request.num_tokens == 64
    assert (request.finish_reason, request.finish_detail) == (FinishReason.LENGTH, "context")


def test_a_request_that_outgrows_the_pool_ends_with_length():
    """A09: 900 tokens of prompt and 500 of answer in a pool of 1,024."""
    harness = Harness(num_blocks=64, max_len=4096)
    request, next_one = make_request(900, 500), make_request(20, 2)
    harness.add(request, next_one)
    harness.run()
    assert request.finish_reason is FinishReason.LENGTH
    assert request.output_token_ids == expected_output(request.prompt_token_ids, 124)
    assert len(next_one.output_token_ids) == 2


def test_a_prompt_one_token_short_of_the_limit_gets_one_token():
    """A11."""
    harness = Harness(num_blocks=4, max_len=64)
    request = make_request(63, None)
    harness.add(request)
    harness.run()
    assert len(request.output_token_ids) == 1
    assert request.finish_reason is FinishReason.LENGTH


def test_abort_works_in_every_state_and_twice():
    """A01: for a queued, a prefilling, a decoding, an ended and an unknown request."""
    harness = Harness(slots=2, max_num_batched_tokens=20)
    decoding, prefilling, queued = make_request(4, 50), make_request(200, 5), make_request(4, 5)
    harness.add(decoding, prefilling, queued)
    harness.step()
    harness.step()
    assert decoding.output_token_ids
    assert 0 < prefilling.num_computed_tokens < 200
    for request in (decoding, prefilling, queued):
        ended = harness.scheduler.finish(request.request_id, FinishReason.ABORT, None, 9.0)
        assert ended is request
        assert harness.scheduler.finish(request.request_id, FinishReason.ABORT, None, 9.0) is None
        harness.scheduler.check_integrity()
    assert harness.scheduler.finish("never existed", FinishReason.ABORT, None, 9.0) is None
    assert harness.kv.pool.num_available == 64
    fresh = make_request(4, 3)
    harness.add(fresh)
    harness.run()
    assert len(fresh.output_token_ids) == 3


def test_an_abort_between_plan_and_result_is_taken():
    """A01: the final step of a request is under way when it is aborted."""
    harness = Harness()
    request, other = make_request(4, 1), make_request(4, 1)
    harness.add(request, other)
    output = harness.scheduler.schedule(1.0)
    step_output = harness.runner.execute(output)
    harness.scheduler.finish(request.request_id, FinishReason.ABORT, None, 1.0)
    progress = harness.scheduler.update_from_output(output, step_output, 1.0)
    assert [each for each, _ in progress] == [other]
    assert request.finish_reason is FinishReason.ABORT
    assert ids(harness.scheduler.take_news().ended) == [request.request_id, other.request_id]
    assert harness.kv.pool.num_available == 64


def test_a_failed_row_ends_its_own_request_only():
    harness = Harness()
    bad, good = make_request(4, 4), make_request(4, 4)
    harness.runner.row_errors[bad.request_id] = "not a number"
    harness.add(bad, good)
    harness.run()
    assert (bad.finish_reason, bad.finish_detail) == (FinishReason.ERROR, "not a number")
    assert good.output_token_ids == expected_output(good.prompt_token_ids, 4)


def test_a_request_that_waits_past_its_deadline_ends_with_an_error():
    """A26."""
    harness = Harness(slots=1)
    running, late = make_request(4, 10), make_request(4, 5, queue_deadline_s=5.0)
    harness.add(running, late)
    harness.run()
    assert late.finish_reason is FinishReason.ERROR
    assert late.finished_s == 5.0
    assert late.finish_detail
    assert not late.output_token_ids
    assert running.finish_reason is FinishReason.LENGTH


def test_a_choice_that_waited_for_another_one_too_late_does_not_start():
    """The one whose prompt it was to share ends at its deadline; its own has passed as well."""
    harness = Harness(slots=1)
    # Its slot becomes free just before the deadline passes.
    harness.add(make_request(4, 4))
    harness.step()
    first = make_request(40, 5, queue_deadline_s=5.0, owner="bob")
    second = make_request(
        first.prompt_token_ids, 5, queue_deadline_s=5.0, fork_of=first.request_id, owner="bob"
    )
    harness.add(first, second)
    assert len(harness.scheduler.waiting) == 1, "the second is held"
    harness.run()
    assert {request.finish_reason for request in (first, second)} == {FinishReason.ERROR}
    assert second not in harness.started


def test_a_deadline_does_not_touch_a_request_that_started():
    harness = Harness(slots=1)
    request = make_request(4, 10, queue_deadline_s=5.0)
    harness.add(request)
    harness.run()
    assert request.finish_reason is FinishReason.LENGTH


def test_the_runner_is_told_once_who_ended():
    harness = Harness()
    first, second = make_request(4, 2), make_request(4, 6)
    harness.add(first, second)
    outputs = [harness.step() for _ in range(6)]
    told = [output.finished_request_ids for output in outputs]
    assert told == [[], [], [first.request_id], [], [], []]


def test_slots_beyond_what_the_memory_holds_are_cut_with_a_reason():
    harness = Harness(slots=48, num_blocks=64)
    for _ in range(20):
        harness.add(make_request(90, 10))
    harness.run()
    slots = harness.scheduler.limits.slots
    assert (slots.requested, slots.effective) == (48, 10)
    assert "100 tokens" in slots.reason


def test_auto_slots_follow_the_memory_and_the_lengths_seen():
    harness = Harness(slots="auto", num_blocks=256)
    before = harness.scheduler.limits.slots.effective
    for _ in range(20):
        harness.add(make_request(90, 10))
    harness.run()
    assert before == 4
    assert harness.scheduler.limits.slots.effective == 40
