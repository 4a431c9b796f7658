"""Failing steps and loads end what they must and nothing else; the end of an engine."""

import threading
from dataclasses import dataclass, field

import pytest

from inference.engine import Engine
from inference.errors import EngineDead, EngineStopping, ModelLoadError, QueueFull
from inference.request import FinishReason
from tests.inference.engine_driving import DEADLINE_S, collect, step_out, until
from tests.inference.helpers import FakeRunner, expected_output, fake_config, make_request

# ---- failures


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(engine, runner):
    def fail(output):
        raise RuntimeError("out of memory")

    runner.before_step = fail
    streams = [engine.add_request(make_request(20, 5)) for _ in range(2)]
    engine.step()
    runner.before_step = lambda output: None
    later = engine.add_request(make_request(20, 5))
    step_out(engine)
    for stream in streams:
        result = collect(stream)
        assert result.finish_reason is FinishReason.ERROR
        assert "out of memory" not in result.finish_detail
    assert collect(later).finish_reason is FinishReason.LENGTH
    stats = engine.stats()
    assert (stats.state, stats.kv.blocks_used) == ("ready", 0)
    assert stats.totals["step_failures"] == 1
    assert any("out of memory" in str(event.data) for event in engine.events_since(0))


def test_a_failing_step_leaves_those_that_wait_alone(runner):
    engine = Engine(fake_config(max_num_seqs=1), runner)
    engine.load()
    failures = iter([RuntimeError("boom")])

    def fail_once(output):
        for failure in failures:
            raise failure

    runner.before_step = fail_once
    first, second = (engine.add_request(make_request(20, 5)) for _ in range(2))
    engine.step()
    step_out(engine)
    assert collect(first).finish_reason is FinishReason.ERROR
    assert collect(second).finish_reason is FinishReason.LENGTH


def test_blocks_of_a_failed_step_are_not_found_by_the_next_request(engine, runner):
    """A08: what a failed step may have half written is never shared."""
    prompt = list(range(100, 164))
    failures = iter([RuntimeError("boom")])

    def fail_once(output):
        for failure in failures:
            raise failure

    runner.before_step = fail_once
    engine.add_request(make_request(prompt, 5))
    engine.step()
    again = engine.add_request(make_request(prompt, 5))
    step_out(engine)
    result = collect(again)
    assert result.num_cached_tokens == 0
    assert result.token_ids == expected_output(prompt, 5)


def test_an_answer_whose_blocks_a_failed_step_was_to_copy_does_not_go_on_without_them():
    """More choices start than the step has tokens for, and the step fails before the copies."""
    runner = FakeRunner(num_blocks=512)
    engine = Engine(fake_config(max_num_seqs=16, max_num_batched_tokens=16), runner)
    engine.load()
    parent = make_request(10, 40)
    engine.add_request(make_request(500, 5))
    for _ in range(3):
        engine.step()
    choices = [
        make_request(parent.prompt_token_ids, 40, fork_of=parent.request_id, owner=parent.owner)
        for _ in range(14)
    ]
    streams = {request: engine.add_request(request) for request in (parent, *choices)}
    failed = []

    def fail_when_they_start(output):
        if output.block_copies:
            failed.append(output)
            runner.before_step = lambda output: None
            raise RuntimeError("boom")

    runner.before_step = fail_when_they_start
    step_out(engine)
    assert len(failed[0].scheduled) < 16, "all of them got a token, so this tests nothing"
    assert engine.stats().totals["step_failures"] == 1, "somebody read what nobody wrote"
    for request, stream in streams.items():
        result = collect(stream)
        if result.finish_reason is not FinishReason.ERROR:
            assert result.token_ids == expected_output(request.prompt_token_ids, 40)


def test_three_failing_steps_in_a_row_end_the_engine_and_every_stream(runner):
    def fail(output):
        raise RuntimeError("boom")

    runner.before_step = fail
    engine = Engine(fake_config(max_num_seqs=1), runner)
    engine.start()
    engine.wait_ready(DEADLINE_S)
    streams = []
    for _ in range(5):
        try:
            streams.append(engine.add_request(make_request(20, 5)))
        except EngineDead:
            break
    assert len(streams) >= 3
    for stream in streams:
        assert collect(stream).finish_reason is FinishReason.ERROR
    until(lambda: engine.stats().state == "dead")
    until(lambda: runner.is_closed)
    with pytest.raises(EngineDead):
        engine.add_request(make_request(4, 1))
    engine.shutdown(0.0)


def test_a_failed_row_ends_that_request_only(engine, runner):
    """A14: one row of logits is not a number."""
    bad, good = make_request(20, 5), make_request(20, 5)
    runner.row_errors[bad.request_id] = "The model gave no usable result."
    bad_stream, good_stream = engine.add_request(bad), engine.add_request(good)
    step_out(engine)
    assert collect(bad_stream).finish_reason is FinishReason.ERROR
    assert collect(good_stream).token_ids == expected_output(good.prompt_token_ids, 5)


@pytest.mark.parametrize("is_shared", [False, True])
def test_what_led_to_a_failed_row_is_not_found_by_the_next_request_a08(engine, runner, is_shared):
    """Keys that are no numbers would fail everybody who begins with the same text, for ever."""
    prompt = list(range(100, 164))
    bad = make_request(prompt, 9)
    streams = [engine.add_request(bad)]
    if is_shared:
        engine.step()
        streams.append(engine.add_request(make_request(prompt, 9)))
        engine.step()
        assert engine._scheduler.kv.pool.num_shared == 3
    runner.row_errors[bad.request_id] = "The model gave no usable result."
    step_out(engine)
    results = [collect(stream) for stream in streams]
    assert results[0].finish_reason is FinishReason.ERROR
    # Who shared them is not ended for it.
    assert all(result.token_ids == expected_output(prompt, 9) for result in results[1:])
    engine._scheduler.check_integrity()
    again = engine.add_request(make_request(prompt, 5))
    step_out(engine)
    result = collect(again)
    assert result.token_ids == expected_output(prompt, 5)
    assert result.num_cached_tokens == 0


def test_an_answer_that_cannot_keep_its_form_costs_nobody_the_cache(engine, runner):
    """The caller's fault, not the model's: otherwise anybody could empty a shared cache."""
    prompt = list(range(100, 164))
    bad = make_request(prompt, 9)
    runner.row_refusals[bad.request_id] = "The answer could not be held to the form."
    stream = engine.add_request(bad)
    step_out(engine)
    assert collect(stream).finish_reason is FinishReason.REFUSED
    again = engine.add_request(make_request(prompt, 5))
    step_out(engine)
    assert collect(again).num_cached_tokens == 48


@dataclass(frozen=True)
class HeldSteps:
    began: threading.Event = field(default_factory=threading.Event)
    may_go_on: threading.Event = field(default_factory=threading.Event)


def hold_steps(runner):
    """Steps wait: an answer would be written whole before a test does anything about it."""
    held = HeldSteps()

    def wait(output):
        held.began.set()
        assert held.may_go_on.wait(DEADLINE_S)

    runner.before_step = wait
    return held


def test_a_fault_of_the_planning_itself_leaves_no_stream_open(running, runner):
    first_step = hold_steps(runner)
    stream = running.add_request(make_request(4, 900))
    assert first_step.began.wait(DEADLINE_S)

    def broken(now_s):
        raise KeyError("bookkeeping")

    running._scheduler.schedule = broken
    first_step.may_go_on.set()
    while (update := stream.get(DEADLINE_S)) is not None:
        last = update
    assert last.finish_reason is FinishReason.ERROR
    until(lambda: running.stats().state == "dead")


def test_a_model_that_cannot_be_loaded_is_told_to_those_who_wait(runner):
    runner.load_error = ModelLoadError("config.json is missing")
    engine = Engine(fake_config(), runner)
    engine.start()
    with pytest.raises(ModelLoadError, match=r"config\.json is missing"):
        engine.wait_ready(DEADLINE_S)
    assert (engine.stats().state, engine.stats().error) == ("dead", "config.json is missing")
    with pytest.raises(EngineDead):
        engine.add_request(make_request(4, 1))
    engine.shutdown(0.0)


def test_requests_are_refused_while_the_model_loads(runner):
    engine = Engine(fake_config(), runner)
    assert engine.stats().state == "loading"
    with pytest.raises(EngineStopping, match="loading"):
        engine.add_request(make_request(4, 1))
    with pytest.raises(TimeoutError):
        engine.wait_ready(0.0)


# ---- the end


def test_draining_finishes_what_runs_and_refuses_the_rest(runner):
    """D08."""
    engine = Engine(fake_config(max_num_seqs=1), runner)
    engine.load()
    first, second = (engine.add_request(make_request(4, 20)) for _ in range(2))
    engine.step()
    engine.drain()
    assert engine.stats().state == "draining"
    with pytest.raises(EngineStopping):
        engine.add_request(make_request(4, 1))
    step_out(engine)
    assert len(collect(first).token_ids) == 20
    assert collect(second).finish_reason is FinishReason.ERROR


def test_a_shutdown_waits_for_what_runs(running, runner):
    first_step = hold_steps(runner)
    stream = running.add_request(make_request(4, 300))
    assert first_step.began.wait(DEADLINE_S)
    stopping = threading.Thread(target=running.shutdown, args=(DEADLINE_S,))
    stopping.start()
    first_step.may_go_on.set()
    stopping.join()
    assert collect(stream).finish_reason is FinishReason.LENGTH
    assert runner.is_closed
    assert running.stats().state == "dead"
    running.shutdown(0.0)


def test_a_shutdown_cuts_off_what_takes_longer_than_its_grace(runner):
    engine = Engine(fake_config(), runner)
    engine.start()
    engine.wait_ready(DEADLINE_S)
    gate = threading.Event()
    stepping = threading.Event()

    def wait(output):
        stepping.set()
        assert gate.wait(DEADLINE_S)

    runner.before_step = wait
    stream = engine.add_request(make_request(4, 900))
    assert stepping.wait(DEADLINE_S)
    engine._stop_at_s = 0.0
    gate.set()
    engine.shutdown(0.0)
    result = collect(stream)
    assert result.finish_reason is FinishReason.ERROR
    assert "stopped before" in result.finish_detail
    assert runner.is_closed


def test_a_step_that_hangs_does_not_hold_up_the_shutdown(runner, monkeypatch):
    monkeypatch.setattr("inference.engine._HANG_S", 0.01)
    engine = Engine(fake_config(), runner)
    engine.start()
    engine.wait_ready(DEADLINE_S)
    gate, stepping = threading.Event(), threading.Event()

    def hang(output):
        stepping.set()
        gate.wait(DEADLINE_S)

    runner.before_step = hang
    stream = engine.add_request(make_request(4, 900))
    assert stepping.wait(DEADLINE_S)
    # Accepted, and not taken in by the engine, which hangs.
    waiting = engine.add_request(make_request(4, 5))
    engine.shutdown(0.0)
    for each in (stream, waiting):
        result = collect(each)
        assert result.finish_reason is FinishReason.ERROR
        assert "stopped before" in result.finish_detail
    assert engine.live_labels() == []
    gate.set()
    until(lambda: runner.is_closed)


def test_a_request_taken_in_while_the_engine_is_given_up_still_gets_its_end(runner, monkeypatch):
    """Between two steps: the engine thread has it in hand when another one ends all streams."""
    engine = Engine(fake_config(), runner)
    engine.start()
    engine.wait_ready(DEADLINE_S)
    take = engine._inbox.take

    def take_and_be_given_up():
        commands = take()
        if commands:
            monkeypatch.setattr(engine._inbox, "take", take)
            engine.abandon("a step did not end")
        return commands

    monkeypatch.setattr(engine._inbox, "take", take_and_be_given_up)
    stream = engine.add_request(make_request(4, 900))
    assert collect(stream).finish_reason is FinishReason.ERROR
    until(lambda: runner.is_closed)
    assert engine.live_labels() == []


def test_a_request_accepted_while_the_engine_ends_still_gets_its_end(runner):
    engine = Engine(fake_config(), runner)
    engine.start()
    engine.wait_ready(DEADLINE_S)
    streams = []

    def keep_asking():
        while True:
            try:
                streams.append(engine.add_request(make_request(4, 50)))
            except (EngineStopping, EngineDead):
                return
            except QueueFull:
                continue

    threads = [threading.Thread(target=keep_asking) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(streams) > 20)
    engine.shutdown(0.0)
    for thread in threads:
        thread.join()
    for stream in streams:
        collect(stream)
