"""The engine over a fake runner: driven by `step()`, and with its own thread."""

import asyncio
import random
import re
import threading
import time
from dataclasses import replace

import pytest

from inference.config import InvalidConfig
from inference.engine import Engine
from inference.errors import (
    EngineDead,
    EngineStopping,
    InvalidPrompt,
    InvalidSamplingParams,
    ModelLoadError,
    PromptTooLong,
    QueueFull,
    RequestRejected,
)
from inference.outputs import StreamUpdate
from inference.request import FinishReason, RequestClass
from tests.inference.helpers import (
    EOS,
    VOCAB_SIZE,
    FakeRunner,
    expected_output,
    fake_config,
    make_request,
)

DEADLINE_S = 20.0


class Clock:
    """Simulated: a second a step."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s

    def step(self, engine, count):
        for _ in range(count):
            self.now_s += 1.0
            engine.step()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def runner():
    return FakeRunner()


@pytest.fixture
def engine(runner):
    """Loaded, driven by the test."""
    engine = Engine(fake_config(), runner)
    engine.load()
    yield engine
    engine.shutdown(0.0)


@pytest.fixture
def running(runner):
    """With its own thread."""
    engine = Engine(fake_config(), runner)
    engine.start()
    engine.wait_ready(DEADLINE_S)
    yield engine
    engine.shutdown(0.0)


def until(condition):
    deadline = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        pause.wait(0.002)


def collect(stream):
    """Everything of a stream merged; asserts the single end."""
    total = StreamUpdate()
    while (update := stream.get(DEADLINE_S)) is not None:
        assert total.finish_reason is None
        total.token_ids += update.token_ids
        total.logprobs += update.logprobs
        total.num_cached_tokens = update.num_cached_tokens
        total.finish_reason, total.finish_detail = update.finish_reason, update.finish_detail
    assert total.finish_reason is not None
    return total


def step_out(engine):
    while engine.step():
        pass


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


# ---- refusals


@pytest.mark.parametrize(
    ("request_args", "error", "text"),
    [
        ({"prompt": []}, InvalidPrompt, "empty"),
        ({"prompt": [5, VOCAB_SIZE]}, InvalidPrompt, str(VOCAB_SIZE)),
        ({"prompt": [-3]}, InvalidPrompt, "-3"),
        ({"prompt": 4, "max_tokens": 0}, InvalidSamplingParams, "max_tokens"),
        ({"prompt": 4, "stop_token_ids": (2147483648,)}, InvalidSamplingParams, "stop_token_ids"),
        ({"prompt": 4, "logit_bias": {999_999_999: 5.0}}, InvalidSamplingParams, "logit_bias"),
    ],
)
def test_a_bad_request_is_refused_before_it_is_queued(engine, request_args, error, text):
    """A12, A13."""
    with pytest.raises(error, match=text):
        engine.add_request(make_request(**request_args))
    engine.step()
    assert engine.stats().totals["requests_rejected"] == 1
    assert engine.stats().num_waiting == 0
    assert engine.events_since(0)[-1].kind == "rejected"


@pytest.mark.parametrize("size", [1024, 1025, 1500, 2048])
def test_a_prompt_that_can_never_fit_the_pool_is_refused_with_the_numbers(engine, size):
    """A09: a pool of 1,024 tokens in a context of 4,096; the next request is served at once."""
    with pytest.raises(PromptTooLong) as refusal:
        engine.add_request(make_request(size, 1))
    assert (refusal.value.num_prompt_tokens, refusal.value.limit_tokens) == (size, 1023)
    assert engine.max_len == 1024
    stream = engine.add_request(make_request(20, 2))
    step_out(engine)
    assert len(collect(stream).token_ids) == 2


@pytest.mark.parametrize("max_tokens", [None, 1, 64])
def test_a_prompt_one_short_of_the_context_gets_one_token_and_one_at_it_is_refused(max_tokens):
    """A11."""
    engine = Engine(fake_config(max_model_len=64), FakeRunner())
    engine.load()
    stream = engine.add_request(make_request(63, max_tokens))
    step_out(engine)
    result = collect(stream)
    assert (len(result.token_ids), result.finish_reason) == (1, FinishReason.LENGTH)
    with pytest.raises(PromptTooLong, match="64 tokens; at most 63 fit the server's context limit"):
        engine.add_request(make_request(64, max_tokens))


def test_beyond_the_queue_cap_requests_are_refused_at_once_with_a_time():
    """A26: two slots, a cap of 20, 300 requests."""
    engine = Engine(fake_config(max_num_seqs=2, max_waiting_requests=20), FakeRunner())
    engine.load()
    streams, refusals = [], []
    for _ in range(300):
        try:
            streams.append(engine.add_request(make_request(4, 3)))
        except QueueFull as refusal:
            refusals.append(refusal)
    assert (len(streams), len(refusals)) == (20, 280)
    assert all(1.0 <= refusal.retry_after_s <= 60.0 for refusal in refusals)
    said = [int(re.search(r"in (\d+) second", str(refusal))[1]) for refusal in refusals]
    assert said == [refusal.retry_after_s for refusal in refusals]
    step_out(engine)
    assert all(len(collect(stream).token_ids) == 3 for stream in streams)
    engine.add_request(make_request(4, 3))


def test_the_queue_is_bounded_by_tokens_too():
    engine = Engine(fake_config(max_waiting_tokens=100), FakeRunner())
    engine.load()
    engine.add_request(make_request(60, 1))
    with pytest.raises(QueueFull, match="60 tokens"):
        engine.add_request(make_request(60, 1))
    step_out(engine)
    engine.add_request(make_request(200, 1))


def test_the_labels_are_those_of_what_has_not_ended(engine):
    names = ("waits", "runs", "ends")
    for name in names:
        engine.add_request(replace(make_request(4, 8, request_id=name), labels={"name": name}))
    assert [labels["name"] for labels in engine.live_labels()] == list(names)
    engine.step()
    engine.abort("ends")
    assert len(engine.live_labels()) == 3
    engine.step()
    assert [labels["name"] for labels in engine.live_labels()] == ["waits", "runs"]


def test_an_id_that_is_under_way_is_refused(engine):
    engine.add_request(make_request(4, 2, request_id="same"))
    with pytest.raises(RequestRejected, match="same"):
        engine.add_request(make_request(4, 2, request_id="same"))
    step_out(engine)
    engine.add_request(make_request(4, 2, request_id="same"))


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


# ---- pictures


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


def test_a_fault_of_the_planning_itself_leaves_no_stream_open(running):
    stream = running.add_request(make_request(4, 900))
    stream.get(DEADLINE_S)

    def broken(now_s):
        raise KeyError("bookkeeping")

    running._scheduler.schedule = broken
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
    stream = running.add_request(make_request(4, 300))
    stream.get(DEADLINE_S)
    running.shutdown(DEADLINE_S)
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
    engine.shutdown(0.0)
    assert collect(stream).finish_reason is FinishReason.ERROR
    gate.set()
    until(lambda: runner.is_closed)


def test_a_change_made_before_the_start_is_applied_first(runner):
    engine = Engine(fake_config(), runner)
    engine.tune(slots=2)
    engine.load()
    engine.step()
    assert engine.stats().slots.requested == 2


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


def test_the_time_of_the_last_step_shows_whether_the_engine_moves(clock):
    engine = Engine(fake_config(), FakeRunner(), clock=clock)
    engine.load()
    clock.step(engine, 3)
    assert engine.stats().last_step_s == clock.now_s


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
