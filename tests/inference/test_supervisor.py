"""One engine is kept serving: rebuilt once when it fails, given up when it hangs, or its model
changed."""

import logging
import threading

import pytest

from inference.errors import (
    EngineDead,
    EngineStopping,
    ModelLoadError,
    NotEnoughMemory,
    SwapRefused,
)
from inference.request import FinishReason
from inference.supervisor import REBUILD_WINDOW_S, EngineSupervisor, SwapOrder
from inference.watchdog import HANG_S, LOST_S, Watchdog
from tests.inference.engine_driving import until
from tests.inference.faults import DEADLINE_S, Faults
from tests.inference.helpers import expected_output, fake_config, make_request
from tests.inference.supervising import ends, kill, kinds, model_folders, order


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def folders(tmp_path):
    return model_folders(tmp_path)


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def supervisor(folders, faults, clock):
    found = EngineSupervisor(
        faults.make_runner,
        {"max_num_seqs": 4},
        clock=clock,
        backoff_s=0.0,
        look_every_s=0.02,
        watch=lambda engine, clock: Watchdog(engine, clock, hang_s=0.05, lost_s=LOST_S),
    )
    found.start(lambda report: folders["former"])
    until(lambda: found.phase.name == "ready")
    yield found
    faults.go_on.set()
    found.stop(0.0)


# ---- an engine that fails


def test_an_engine_that_fails_is_rebuilt_and_serves_again(supervisor, faults):
    streams = kill(supervisor, faults)
    assert {ends(stream) for stream in streams} == {None}, "every stream had its end"
    until(lambda: supervisor.phase.name == "ready" and len(faults.runners) == 2)
    assert faults.runners[0].is_closed
    assert faults.names == ["former", "former"]
    request = make_request(20, 5)
    stream = supervisor.served.engine.add_request(request)
    tokens = []
    while (update := stream.get(DEADLINE_S)) is not None:
        tokens += update.token_ids
    assert tokens == expected_output(request.prompt_token_ids, 5)
    assert kinds(supervisor)[-3:-1] == ["engine_rebuilt", "admitted"]
    failed = next(e for e in supervisor.events.since(0) if e.kind == "engine_failed")
    assert "boom" in failed.data["cause"]


def test_an_engine_that_fails_again_soon_stays_dead_and_says_what_to_do(supervisor, faults, clock):
    kill(supervisor, faults)
    until(lambda: supervisor.phase.name == "ready" and len(faults.runners) == 2)
    clock.now_s += REBUILD_WINDOW_S - 1
    kill(supervisor, faults)
    until(lambda: supervisor.phase.name == "dead")
    assert len(faults.runners) == 2
    assert supervisor.served is None
    assert "boom" in supervisor.phase.error
    assert "restart the server" in supervisor.phase.error


def test_failures_far_apart_are_each_mended(supervisor, faults, clock):
    for number in (2, 3):
        kill(supervisor, faults)
        until(lambda number=number: len(faults.runners) == number)
        until(lambda: supervisor.phase.name == "ready")
        clock.now_s += REBUILD_WINDOW_S + 1


def test_an_engine_that_cannot_be_rebuilt_is_dead_with_both_reasons(supervisor, faults):
    faults.load_errors["former"] = NotEnoughMemory("2 GB are free.")
    kill(supervisor, faults)
    until(lambda: supervisor.phase.name == "dead")
    assert "boom" in supervisor.phase.error
    assert "2 GB are free" in supervisor.phase.error


def test_live_settings_hold_in_the_rebuilt_engine(supervisor, faults):
    supervisor.tune({"slots": 2})
    kill(supervisor, faults)
    until(lambda: supervisor.phase.name == "ready" and len(faults.runners) == 2)
    until(lambda: supervisor.engine.stats().slots.requested == 2)


def test_a_model_that_never_loaded_is_not_tried_again(folders, faults):
    faults.load_errors["former"] = ModelLoadError("config.json is missing")
    supervisor = EngineSupervisor(faults.make_runner, {}, backoff_s=0.0)
    supervisor.start(lambda report: folders["former"])
    until(lambda: supervisor.phase.name == "dead")
    assert supervisor.phase.error == "config.json is missing"
    assert len(faults.runners) == 1


# ---- a step that hangs


def hang(supervisor, faults):
    faults.is_hanging.clear()
    faults.go_on.clear()
    stream = supervisor.engine.add_request(make_request(8, 100))
    assert faults.is_hanging.wait(DEADLINE_S)
    return stream


def test_a_step_that_hangs_ends_its_streams_and_says_where_it_is_d09(supervisor, faults, caplog):
    with caplog.at_level(logging.CRITICAL, logger="inference.watchdog"):
        stream = hang(supervisor, faults)
        assert ends(stream).finish_reason is FinishReason.ERROR
        until(lambda: supervisor.phase.name == "hung")
    assert supervisor.served is None
    assert "_fault" in caplog.text, "the stack names the call that hangs"
    assert not supervisor.is_lost
    with pytest.raises(EngineDead):
        supervisor.engine.add_request(make_request(4, 1))


def test_a_step_that_returns_after_all_gives_the_memory_back_and_is_followed_by_a_new_engine(
    supervisor, faults
):
    hang(supervisor, faults)
    until(lambda: supervisor.phase.name == "hung")
    faults.go_on.set()
    until(lambda: supervisor.phase.name == "ready")
    assert faults.runners[0].is_closed
    assert len(faults.runners) == 2
    assert "engine_rebuilt" in kinds(supervisor)


def test_a_step_that_never_returns_asks_for_the_end_of_the_process(supervisor, faults, clock):
    hang(supervisor, faults)
    until(lambda: supervisor.phase.name == "hung")
    clock.now_s += LOST_S + 1
    until(lambda: supervisor.is_lost)
    assert "restart the server" in supervisor.phase.error
    assert len(faults.runners) == 1, "its memory is taken: no second engine beside it"
    with pytest.raises(SwapRefused):
        supervisor.ask_swap(SwapOrder(model="x", resolve=None, drain_s=0.0))


def test_the_watchdog_goes_by_its_clock_and_never_takes_idleness_for_a_hang(faults):
    from inference.engine import Engine

    clock = Clock()
    runner = faults.make_runner(fake_config())
    engine = Engine(fake_config(), runner, clock=clock)
    engine.load()
    dog = Watchdog(engine, clock)
    clock.now_s += 10 * HANG_S
    assert not dog.has_hung(), "nothing runs"
    seen = []

    def look(output):
        clock.now_s += HANG_S
        seen.append(dog.has_hung())
        clock.now_s += 1
        seen.append(dog.has_hung())
        seen.append(dog.has_hung())

    runner.before_step = look
    stream = engine.add_request(make_request(8, 3))
    engine.step()
    assert seen == [False, True, False], "told once, and only past the limit"
    assert ends(stream).finish_reason is FinishReason.ERROR


# ---- another model


def test_the_model_changes_after_running_answers_have_finished(supervisor, folders, faults):
    running = supervisor.engine.add_request(make_request(8, 300))
    running.get(DEADLINE_S)
    told = []
    supervisor.ask_swap(order(folders, on_loaded=lambda: told.append(True)))
    assert ends(running).finish_reason is FinishReason.LENGTH
    until(lambda: supervisor.swap.is_over)
    assert supervisor.swap.stage == "done"
    assert supervisor.phase.name == "ready"
    assert supervisor.served.engine.info.model_name == "newer"
    assert told == [True]
    assert faults.runners[0].is_closed
    assert kinds(supervisor)[-1] == "swapped"


def test_what_takes_longer_than_its_time_is_cut_off_and_what_waits_is_refused(
    supervisor, folders, faults
):
    gate = threading.Event()
    faults.runners[0].before_step = lambda output: gate.wait(0.02)
    streams = [supervisor.engine.add_request(make_request(8, 3000)) for _ in range(6)]
    until(lambda: supervisor.engine.stats().num_running == 4)
    former = supervisor.engine
    supervisor.ask_swap(order(folders, drain_s=0.2))
    updates = [ends(stream) for stream in streams]
    assert {update.finish_reason for update in updates} == {FinishReason.ERROR}
    assert all("model" in update.finish_detail for update in updates)
    until(lambda: supervisor.swap.is_over)
    with pytest.raises((EngineStopping, EngineDead)):
        former.add_request(make_request(4, 1))


def test_nothing_of_the_former_models_cache_is_found_by_the_next(supervisor, folders):
    prompt = list(range(20, 84))
    for _ in range(2):
        ends(supervisor.engine.add_request(make_request(prompt, 2)))
    supervisor.ask_swap(order(folders, "former"))
    until(lambda: supervisor.swap.is_over)
    stream = supervisor.served.engine.add_request(make_request(prompt, 2))
    assert ends(stream).num_cached_tokens == 0


def test_a_model_that_cannot_be_loaded_leaves_the_former_one_serving_c18(
    supervisor, folders, faults
):
    faults.load_errors["newer"] = NotEnoughMemory("The weights need 10 GB; 2 GB are free.")
    supervisor.ask_swap(order(folders))
    until(lambda: supervisor.swap.is_over)
    assert supervisor.swap.stage == "failed"
    assert "10 GB" in supervisor.swap.error
    assert "former is served as before" in supervisor.swap.error
    assert supervisor.phase.name == "ready"
    assert supervisor.served.engine.info.model_name == "former"
    assert faults.names == ["former", "newer", "former"]
    assert [runner.is_closed for runner in faults.runners] == [True, True, False]


def test_a_broken_folder_is_refused_before_any_answer_is_ended_c18(supervisor, folders, faults):
    (folders["newer"] / "tokenizer.json").write_text("{")
    engine = supervisor.engine
    supervisor.ask_swap(order(folders))
    until(lambda: supervisor.swap.is_over)
    assert supervisor.swap.stage == "failed"
    assert "Nothing was changed" in supervisor.swap.error
    assert supervisor.engine is engine
    assert ends(engine.add_request(make_request(8, 3))).finish_reason is FinishReason.LENGTH


def test_when_neither_model_loads_the_engine_is_dead_and_another_can_be_tried(
    supervisor, folders, faults
):
    faults.load_errors |= {"newer": ModelLoadError("Bad."), "former": ModelLoadError("Gone.")}
    supervisor.ask_swap(order(folders))
    until(lambda: supervisor.phase.name == "dead")
    assert "Bad." in supervisor.phase.error
    assert "Gone." in supervisor.phase.error
    until(lambda: supervisor.swap.is_over)
    supervisor.ask_swap(order(folders))
    until(lambda: supervisor.phase.name == "ready")
    assert supervisor.served.engine.info.model_name == "newer"


def test_two_changes_at_once_are_refused(supervisor, folders):
    go_on = threading.Event()

    def resolve(report):
        assert go_on.wait(DEADLINE_S)
        return folders["newer"]

    supervisor.ask_swap(order(folders, resolve=resolve))
    with pytest.raises(SwapRefused, match="newer"):
        supervisor.ask_swap(order(folders, "former"))
    go_on.set()
    until(lambda: supervisor.swap.is_over)
    assert supervisor.swap.stage == "done"


def test_a_stop_in_the_middle_of_a_change_leaves_no_engine_behind(folders, faults):
    supervisor = EngineSupervisor(faults.make_runner, {}, backoff_s=0.0)
    supervisor.start(lambda report: folders["former"])
    until(lambda: supervisor.phase.name == "ready")
    pause = threading.Event()
    faults.runners[0].before_step = lambda output: pause.wait(0.01)
    running = supervisor.engine.add_request(make_request(8, 3000))
    running.get(DEADLINE_S)
    supervisor.ask_swap(order(folders))
    until(lambda: supervisor.phase.name == "swapping")
    supervisor.stop(0.0)
    assert ends(running).finish_reason is FinishReason.ERROR
    until(lambda: all(runner.is_closed for runner in faults.runners))
    assert supervisor.phase.name == "stopping"
