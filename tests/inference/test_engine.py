"""The engine over a fake runner: answers, aborts, live settings."""

import asyncio
import random
import sys
import threading

import pytest

from inference.config import InvalidConfig
from inference.engine import Engine
from inference.request import FinishReason, RequestClass
from tests.inference.engine_driving import DEADLINE_S, collect, step_out, until
from tests.inference.helpers import EOS, FakeRunner, expected_output, fake_config, make_request

# ---- serving


def test_a_request_is_answered(running):
    request = make_request(20, 6)
    result = collect(running.add_request(request))
    assert result.token_ids == expected_output(request.prompt_token_ids, 6)
    assert result.finish_reason is FinishReason.LENGTH


async def test_requests_of_one_event_loop_stream_side_by_side(running):
    requests = [make_request(10 + n, 30) for n in range(8)]

    async def read(request):
        token_ids = []
        async for update in running.add_request(request):
            token_ids += update.token_ids
        return token_ids

    results = await asyncio.gather(*map(read, requests))
    for request, token_ids in zip(requests, results, strict=True):
        assert token_ids == expected_output(request.prompt_token_ids, 30)


def test_the_end_of_sequence_id_is_part_of_the_stream(engine, runner):
    request = make_request(4, 9)
    runner.script[request.request_id] = [50, EOS, 60]
    stream = engine.add_request(request)
    step_out(engine)
    result = collect(stream)
    assert result.token_ids == [50, EOS]
    assert result.finish_reason is FinishReason.STOP


def test_logprobs_come_one_a_token(engine):
    stream = engine.add_request(make_request(4, 5, logprobs=0))
    step_out(engine)
    assert len(collect(stream).logprobs) == 5


def test_prompt_progress_and_cached_tokens_are_told(runner):
    engine = Engine(fake_config(max_num_batched_tokens=16), runner)
    engine.load()
    prompt = list(range(100, 164))
    first = engine.add_request(make_request(prompt, 1))
    engine.step()
    assert first.get(0).num_computed_prompt_tokens == 16
    engine.step()
    assert first.get(0).num_computed_prompt_tokens == 32
    step_out(engine)
    second = engine.add_request(make_request(prompt, 1))
    step_out(engine)
    assert collect(second).num_cached_tokens == 48


def test_the_engine_thread_loads_and_computes(runner):
    names = []
    original = runner.load

    def load(on_progress):
        names.append(threading.current_thread().name)
        return original(on_progress)

    runner.load = load
    runner.before_step = lambda output: names.append(threading.current_thread().name)
    engine = Engine(fake_config(), runner)
    engine.start()
    engine.wait_ready(DEADLINE_S)
    collect(engine.add_request(make_request(4, 2)))
    engine.shutdown(1.0)
    assert set(names) == {"engine"}


def test_choices_of_one_prompt_share_its_blocks(engine, runner):
    parent = make_request(100, 5)
    requests = [
        parent,
        *(
            make_request(parent.prompt_token_ids, 5, fork_of=parent.request_id, owner=parent.owner)
            for _ in range(2)
        ),
    ]
    streams = [engine.add_request(request) for request in requests]
    step_out(engine)
    for stream in streams:
        assert collect(stream).token_ids == expected_output(parent.prompt_token_ids, 5)
    assert sum(runner.num_prompt_tokens.values()) == 102


def test_one_users_flood_does_not_hold_up_another_user():
    """A26: 200 queued requests of one user, then a single short one of another."""
    runner = FakeRunner()
    engine = Engine(fake_config(max_num_seqs=2), runner)
    engine.load()
    for _ in range(200):
        engine.add_request(make_request(8, 5, owner="flood"))
    engine.step()
    single = make_request(8, 5, owner="bob", request_class=RequestClass.API)
    engine.add_request(single)
    for _ in range(5):
        engine.step()
    assert single.first_scheduled_s is not None


# ---- aborts


def test_an_abort_takes_effect_within_a_step_and_twice_is_nothing(engine):
    """A01."""
    stream = engine.add_request(make_request(4, 500, request_id="r"))
    engine.step()
    assert engine.abort("r")
    assert engine.abort("r")
    engine.step()
    assert not engine.abort("r")
    assert not engine.abort("never existed")
    assert collect(stream).finish_reason is FinishReason.ABORT
    stats = engine.stats()
    assert (stats.num_running, stats.kv.blocks_used) == (0, 0)
    assert stats.totals["requests_aborted"] == 1


def test_an_end_at_a_stop_string_counts_as_finished(engine):
    stream = engine.add_request(make_request(4, 500, request_id="r"))
    engine.step()
    engine.abort("r", FinishReason.STOP, "</end>")
    engine.step()
    result = collect(stream)
    assert (result.finish_reason, result.finish_detail) == (FinishReason.STOP, "</end>")
    totals = engine.stats().totals
    assert (totals["requests_finished"], totals["requests_aborted"]) == (1, 0)


def test_prompts_of_clients_that_left_are_never_computed():
    """A03: ten queued prompts are abandoned; the next request starts as soon as the slot frees."""
    runner = FakeRunner(num_blocks=256)
    engine = Engine(fake_config(max_num_seqs=1), runner)
    engine.load()
    busy = engine.add_request(make_request(4, 5))
    engine.step()
    abandoned = [make_request(1500, 5) for _ in range(10)]
    for stream in [engine.add_request(request) for request in abandoned]:
        stream.close()
    short = engine.add_request(make_request(4, 1))
    step_out(engine)
    assert collect(busy).finish_reason is FinishReason.LENGTH
    assert len(collect(short).token_ids) == 1
    assert not runner.num_prompt_tokens.keys() & {request.request_id for request in abandoned}
    assert engine.stats().step_id == 6


def test_clients_that_leave_at_any_moment_leave_nothing_behind(running):
    """A01: 200 streams of three tokens, each closed somewhere between its tokens and its end."""
    rng = random.Random(1)
    streams = []
    for _ in range(200):
        stream = running.add_request(make_request(rng.randrange(1, 40), 3))
        streams.append(stream)
        for _ in range(rng.randrange(3)):
            if stream.get(DEADLINE_S) is None:
                break
        stream.close()
    until(lambda: running.stats().num_running == running.stats().num_waiting == 0)
    until(lambda: sum(running.stats().totals.get(f"requests_{k}", 0) for k in ENDS) == 200)
    kv = running.stats().kv
    assert (kv.blocks_used, kv.blocks_free + kv.blocks_cached) == (0, kv.blocks_total)
    assert len(collect(running.add_request(make_request(4, 3))).token_ids) == 3


ENDS = ("finished", "aborted", "failed")


async def test_leaving_the_iteration_aborts(running):
    stream = running.add_request(make_request(4, 900))
    await anext(stream)
    await stream.aclose()
    while running.stats().totals.get("requests_aborted") != 1:
        await asyncio.sleep(0)
    assert running.stats().kv.blocks_used == 0


def test_a_consumer_whose_event_loop_is_gone_is_aborted(running):
    async def ask():
        running.add_request(make_request(4, 900))

    asyncio.run(ask())
    until(lambda: running.stats().totals["requests_aborted"] == 1)


# ---- live settings


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": 0},
        {"slots": "many"},
        {"slots": True},
        {"slots": 2.5},
        {"max_num_batched_tokens": -1},
        {"reserved_interactive_slots": -1},
        {"max_waiting_requests": 0},
        {"enable_prefix_cache": "yes"},
        {"policy": "psychic"},
        {"aging_s": float("nan")},
        {"admission_headroom": 2},
        {"owner_weights": {"alice": 0}},
        {"no_such_setting": 1},
        {"slots": 3, "policy": "psychic"},
    ],
)
def test_a_bad_change_is_refused_and_nothing_changes(engine, changes):
    with pytest.raises(InvalidConfig, match=next(reversed(changes))):
        engine.tune(**changes)
    engine.step()
    assert engine.stats().slots.requested == 4


def test_a_change_takes_effect_at_the_next_step(engine):
    streams = [engine.add_request(make_request(4, 40)) for _ in range(6)]
    engine.step()
    engine.tune(slots=6, max_num_batched_tokens=100, reserved_interactive_slots=1)
    engine.step()
    engine.step()
    step_out(engine)
    assert all(len(collect(stream).token_ids) == 40 for stream in streams)
    stats = engine.stats()
    assert (stats.slots.requested, stats.slots.effective) == (6, 6)
    assert stats.settings["max_num_batched_tokens"].effective == 100
    assert stats.settings["reserved_interactive_slots"].effective == 1
    assert [event.kind for event in engine.events_since(0)].count("tuned") == 1


def test_a_change_made_before_the_start_is_applied_first(runner):
    engine = Engine(fake_config(), runner)
    engine.tune(slots=2)
    engine.load()
    engine.step()
    assert engine.stats().slots.requested == 2


def opcodes_of(engine, clock, num_steps):
    """Python instructions executed in so many steps: what they cost, whatever else the machine
    does."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        clock.step(engine, num_steps)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("class_weights", ["strict", {"api": 2.0}])
def test_a_step_costs_the_same_however_many_wait(clock, class_weights):
    """Requests end and start, places in line are told, pictures are made in these steps too."""
    costs = []
    for num_waiting in (1500, 6000):
        config = fake_config(max_num_seqs=8, max_waiting_requests=10_000)
        engine = Engine(config, FakeRunner(num_blocks=256), clock=clock)
        engine.load()
        engine.tune(class_weights=class_weights)
        for number in range(num_waiting):
            request_class = list(RequestClass)[number % 3]
            owner = f"user{number % 20}"
            engine.add_request(make_request(12, 6, owner=owner, request_class=request_class))
        clock.step(engine, 3)
        costs.append(opcodes_of(engine, clock, 16))
    # Heaps are deeper by a few comparisons.
    assert costs[1] < 1.1 * costs[0]
