"""What observers see of the engine: state, block map, places in line, events."""

import pytest

from inference.engine import Engine
from inference.request import FinishReason
from tests.inference.engine_driving import collect, step_out, until
from tests.inference.helpers import FakeRunner, fake_config, make_request


def test_the_console_sees_the_slot_of_each_request(clock):
    engine = Engine(fake_config(max_num_seqs=2), FakeRunner(), clock=clock)
    engine.load()
    engine.add_request(make_request(4, 2, request_id="a"))
    engine.add_request(make_request(4, 40, request_id="b", owner="zoe"))
    engine.add_request(make_request(4, 40, request_id="c"))
    clock.step(engine, 1)
    before = {info.request_id: info for info in engine.stats().requests}
    clock.step(engine, 2)
    after = {info.request_id: info for info in engine.stats().requests}
    assert [before[each].slot for each in "abc"] == [0, 1, None]
    assert (before["c"].state, before["c"].queue_position) == ("waiting", 0)
    assert (after["b"].slot, after["b"].owner, after["b"].state) == (1, "zoe", "decode")
    assert (after["b"].num_output_tokens, after["b"].num_blocks) == (3, 1)
    assert after["c"].slot == 0
    assert "a" not in after


def share_a_prefix(clock):
    """Two running requests with a common beginning of three blocks."""
    engine = Engine(fake_config(), FakeRunner(), clock=clock)
    engine.load()
    shared = list(range(100, 148))
    engine.block_map()
    engine.add_request(make_request([*shared, 1, 3], 50, request_id="a"))
    clock.step(engine, 1)
    engine.add_request(make_request([*shared, 4, 5], 50, request_id="b"))
    clock.step(engine, 1)
    return engine


def test_the_state_counts_every_block_once(clock):
    kv = share_a_prefix(clock).stats().kv
    assert (kv.blocks_used, kv.blocks_shared, kv.blocks_cached, kv.blocks_free) == (5, 3, 0, 59)
    assert kv.slots_wasted == 13 + 14


def test_the_block_map_shows_who_holds_what(clock):
    shown = share_a_prefix(clock).block_map()
    assert shown.step_id == 2
    assert set(shown.holders) == {("a", "b"), ("a",), ("b",)}
    counts = {holder: list(shown.cells).count(n) for n, holder in enumerate(shown.holders)}
    assert counts == {("a", "b"): 3, ("a",): 1, ("b",): 1}
    assert list(shown.cells).count(-1) == 59
    assert sorted(shown.partial.values()) == [2, 3]
    assert sorted(shown.token_start.values()) == [0, 16, 32, 48, 48]


def test_the_block_map_is_not_made_when_nobody_looks(clock):
    engine = share_a_prefix(clock)
    clock.step(engine, 10)
    assert engine.block_map().step_id <= 4
    clock.step(engine, 1)
    assert engine.block_map().step_id == 13


def test_the_block_map_is_fresh_after_the_engine_went_idle(running):
    running.block_map()
    collect(running.add_request(make_request(40, 2)))
    until(lambda: -2 in running.block_map().cells)


def test_the_block_map_shows_an_abort_that_left_nothing_to_compute(clock):
    engine = share_a_prefix(clock)
    for request_id in ("a", "b"):
        engine.abort(request_id)
    assert engine.step() is False
    clock.step(engine, 1)
    engine.block_map()
    clock.step(engine, 1)
    assert not engine.block_map().holders
    assert engine.stats().kv.blocks_used == 0


def test_waiting_requests_are_told_their_place(engine):
    for _ in range(4):
        engine.add_request(make_request(4, 6))
    fifth, sixth = engine.add_request(make_request(4, 6)), engine.add_request(make_request(4, 6))
    engine.step()
    assert fifth.get(0).queue_position == 0
    assert sixth.get(0).queue_position == 1
    step_out(engine)
    assert collect(sixth).finish_reason is FinishReason.LENGTH


def test_a_preempted_answer_is_told_its_place_each_time_and_only_while_it_waits(clock):
    engine = Engine(fake_config(max_num_seqs=2), FakeRunner(), clock=clock)
    engine.load()
    engine.add_request(make_request(8, 50))
    request = make_request(8, 50)
    stream = engine.add_request(request)
    for _ in range(2):
        clock.step(engine, 2)
        assert stream.take().queue_position is None
        # A static batch takes nobody in: it waits.
        engine.tune(policy="static")
        run = engine._scheduler.running.get(request.request_id)
        engine._scheduler._preempt(run, "slots", 1, clock())
        clock.step(engine, 1)
        assert stream.take().queue_position == 0
        engine.tune(policy="continuous")
        clock.step(engine, 2)
        update = stream.take()
        assert (update.queue_position, len(update.token_ids)) == (None, 2)


def test_an_estimate_of_the_wait_comes_once_there_is_a_basis(clock):
    engine = Engine(fake_config(max_num_seqs=1), FakeRunner(), clock=clock)
    engine.load()
    streams = [engine.add_request(make_request(4, 3)) for _ in range(4)]
    clock.step(engine, 1)
    assert streams[3].get(0).estimated_wait_s is None
    clock.step(engine, 3)
    update = streams[3].get(0)
    assert update.queue_position == 1
    assert update.estimated_wait_s == pytest.approx(4.0)


def test_times_and_rates_are_measured(clock):
    engine = Engine(fake_config(max_num_seqs=2), FakeRunner(), clock=clock)
    engine.load()
    for _ in range(4):
        engine.add_request(make_request(8, 3))
    clock.step(engine, 7)
    stats = engine.stats()
    # Two get their first token after a step, two after four.
    assert (stats.ttft_s["p50"], stats.ttft_s["p95"]) == (4.0, 4.0)
    assert stats.itl_s["p50"] == 1.0
    assert stats.totals["generated_tokens"] == 12
    assert stats.totals["prompt_tokens"] == 32
    assert stats.cache_hit_rate == 0.0
    assert stats.decode_tokens_per_s > 0


def test_events_tell_the_life_of_a_request(engine):
    engine.add_request(make_request(4, 2, request_id="r"))
    step_out(engine)
    events = engine.events_since(0)
    assert [event.kind for event in events] == ["admitted", "finished"]
    assert {event.request_id for event in events} == {"r"}
    assert engine.events_since(events[0].event_id) == events[1:]
    assert engine.events_since(events[1].event_id) == []


def test_a_preemption_event_names_the_victim_the_loss_and_the_setting():
    engine = Engine(fake_config(), FakeRunner(num_blocks=8))
    engine.load()
    for _ in range(2):
        engine.add_request(make_request(30, 60))
    step_out(engine)
    event = next(event for event in engine.events_since(0) if event.kind == "preempted")
    assert event.request_id
    assert event.data["tokens_lost"] > 0
    assert (event.data["setting"], event.data["value"]) == ("slots", 1)


def test_a_preemption_for_a_users_cap_names_the_cap_that_would_have_done():
    def preempted(cap):
        engine = Engine(fake_config(), FakeRunner())
        engine.load()
        engine.tune(max_blocks_per_owner=cap)
        for _ in range(2):
            engine.add_request(make_request(40, 32))
        step_out(engine)
        return [event.data for event in engine.events_since(0) if event.kind == "preempted"]

    told = preempted(8)[0]
    assert told["setting"] == "max_blocks_per_owner"
    assert preempted(told["value"]) == []


def test_the_time_of_the_last_step_shows_whether_the_engine_moves(clock):
    engine = Engine(fake_config(), FakeRunner(), clock=clock)
    engine.load()
    clock.step(engine, 3)
    assert engine.stats().last_step_s == clock.now_s
