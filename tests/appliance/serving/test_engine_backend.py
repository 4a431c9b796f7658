"""The in-process engine behind the gateway: the real engine, a scripted model, a real tokenizer."""

import asyncio
import contextlib
import threading
import time
from dataclasses import replace

import orjson
import pytest

from appliance.errors import (
    ApplianceError,
    BadRequest,
    ContextLengthExceeded,
    EngineUnavailable,
    GenerationFailed,
    ModelNotFound,
    QueueIsFull,
)
from appliance.serving.engine_backend import EngineBackend
from appliance.serving.engine_words import _ERRORS, appliance_error
from appliance.serving.news import News
from appliance.serving.types import (
    Caller,
    Delta,
    Finished,
    GenerationRequest,
    Queued,
    Reading,
    SamplingOptions,
)
from inference import errors as engine_errors
from inference.errors import InferenceError
from tests.inference.chat_templates import chatml_folder
from tests.inference.helpers import FakeRunner

DEADLINE_S = 30


class PacedRunner(FakeRunner):
    """Computes a step for each `allow`."""

    def __init__(self, **options):
        super().__init__(**options)
        self._allowed = threading.Semaphore(0)
        self.before_step = self._wait

    def allow(self, num_steps=100_000):
        self._allowed.release(num_steps)

    def _wait(self, output):
        assert self._allowed.acquire(timeout=DEADLINE_S), "the test never allowed the step"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return chatml_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def make(model_dir):
    made = []

    async def make(
        *, free=True, resolve=None, load_error=None, wait=True, backoff_s=0.0, **options
    ):
        runner = PacedRunner(**{"max_model_len": 200, **options})
        runner.load_error = load_error
        backend = EngineBackend(
            resolve or (lambda report: model_dir),
            lambda config: runner,
            config={"max_num_seqs": 4},
            backoff_s=backoff_s,
            look_every_s=0.02,
        )
        made.append((backend, runner))
        backend.start()
        if free:
            runner.allow()
        if wait:
            await until(lambda: backend.state()["state"] != "loading")
        return backend, runner

    yield make
    for backend, runner in made:
        runner.allow()
        await backend.stop(0.0)


async def until(claim, runner=None):
    """Wait for `claim`; with a runner, one step at a time, as pictures are made between steps."""
    deadline = time.monotonic() + DEADLINE_S
    while not claim():
        assert time.monotonic() < deadline, "it never came true"
        if runner is not None:
            runner.allow(1)
        await asyncio.sleep(0.01)


def request(text="hello there", *, user_id=7, model=None, prompt=None, **options):
    messages = None if prompt is not None else [{"role": "user", "content": text}]
    return GenerationRequest(
        caller=Caller(user_id=user_id, username="bob", source="api", key_prefix="bh_abcd"),
        messages=messages,
        prompt=prompt,
        options=SamplingOptions(**{"temperature": 0.0, "max_tokens": 20, **options}),
        model=model,
    )


async def open_stream(backend, *args, **options):
    return await backend.generate(await backend.prepare(request(*args, **options)))


async def each(stream):
    """Its events as they come; leaving early closes it, as every reader does."""
    news = News()
    stream.listen(news.ring)
    try:
        while True:
            for event in stream.take():
                yield event
                if isinstance(event, Finished):
                    return
            await news.wait()
    finally:
        await stream.aclose()


async def read(stream):
    return [event async for event in each(stream)]


# ---- answers


async def test_an_answer_streams_in_and_ends_once(make):
    backend, _ = await make()
    stream = await open_stream(backend)
    events = await read(stream)
    finished = events[-1]
    assert [type(event) for event in events].count(Finished) == 1
    assert (finished.finish_reason, finished.completion_tokens) == ("length", 20)
    assert finished.prompt_tokens == stream.prompt_tokens > 5
    assert finished.error is None
    assert "".join(event.text for event in events if isinstance(event, Delta))
    assert finished.ttft_s <= finished.duration_s


async def test_limits_are_told_before_anything_is_queued(make):
    backend, _ = await make()
    prepared = await backend.prepare(request(max_tokens=None))
    assert prepared.max_completion_tokens == 200 - prepared.prompt_tokens
    assert backend.state()["totals"].get("requests_started", 0) == 0


async def test_those_who_wait_are_told_how_many_are_ahead(make):
    backend, runner = await make(free=False)
    streams = [await open_stream(backend) for _ in range(6)]
    waiting = asyncio.ensure_future(anext(each(streams[-1])))
    runner.allow(2)
    event = await asyncio.wait_for(waiting, DEADLINE_S)
    assert isinstance(event, Queued)
    assert event.ahead in (1, 5)
    runner.allow()
    for stream in streams:
        await stream.aclose()


async def test_log_probabilities_pass_through(make):
    backend, _ = await make()
    events = await read(await open_stream(backend, logprobs=0, max_tokens=4))
    entries = [entry for event in events if isinstance(event, Delta) for entry in event.logprobs]
    assert len(entries) == 4
    assert entries[0][2] == -0.5


async def test_a_raw_prompt_takes_text_and_token_ids(make):
    backend, _ = await make()
    for prompt in ("hello", [70, 71, 72]):
        events = await read(await open_stream(backend, prompt=prompt, max_tokens=2))
        assert events[-1].completion_tokens == 2


# ---- who asks


async def test_the_engine_knows_the_caller_and_shares_no_prefix_between_users_a06(make):
    backend, runner = await make()
    text = "a private text " * 6
    first = (await read(await open_stream(backend, text, user_id=1)))[-1]
    other = (await read(await open_stream(backend, text, user_id=2)))[-1]
    again = (await read(await open_stream(backend, text, user_id=1)))[-1]
    assert (first.cached_tokens, other.cached_tokens) == (0, 0)
    assert again.cached_tokens >= 16
    seen = runner.outputs[0].scheduled[0].request
    assert (seen.owner, seen.cache_scope) == ("user:1", "user:1")
    assert seen.labels == {
        "username": "bob",
        "user_id": "1",
        "source": "api",
        "key_prefix": "bh_abcd",
        "key_id": "",
    }
    assert seen.request_class == "api"


async def test_only_the_servers_own_prompt_is_shared_between_users(make):
    backend, _ = await make()
    text = "a private text " * 6
    ours = "Answer the team of the shop in short words. " * 2

    async def cached(user_id, server_prompt=ours):
        asked = replace(request(text, user_id=user_id, max_tokens=2), server_prompt=server_prompt)
        prepared = await backend.prepare(asked)
        finished = (await read(await backend.generate(prepared)))[-1]
        return finished.cached_tokens, prepared.prompt.num_public_prefix_tokens

    assert (await cached(1))[0] == 0
    for user_id in (2, 3):
        num_cached, num_public = await cached(user_id)
        assert num_public > len(ours) // 2
        # Every block that holds nothing of the user, and none that does.
        assert num_cached == num_public // 16 * 16
    # The user's own text is found by the user alone.
    assert (await cached(1))[0] > num_public
    assert (await cached(4, server_prompt="Other words. " * 4))[0] < 16


async def test_the_state_says_whose_beginnings_were_found_again_and_nothing_of_their_text(make):
    backend, _ = await make()
    text = "a private text " * 6
    for user_id in (1, 2, 1, 1):
        await read(await open_stream(backend, text, user_id=user_id))
    # The picture of the last step comes a moment after its tokens.
    await until(lambda: [each["num_hits"] for each in backend.state()["prefixes"]] == [2])
    state = orjson.loads(orjson.dumps(backend.state()))
    [found] = state["prefixes"]
    assert found["scope"] == "user:1"
    assert found["num_tokens"] >= 16
    assert found["num_tokens_saved"] == 2 * found["num_tokens"]
    assert "private" not in str(state)


# ---- early ends


async def test_closing_frees_and_keeps_the_true_count(make):
    backend, runner = await make(free=False)
    stream = await open_stream(backend)
    reading = asyncio.ensure_future(read(stream))
    runner.allow(4)
    await until(lambda: stream.completion_tokens == 4)
    closing = asyncio.ensure_future(stream.aclose())
    await until(closing.done, runner)
    await stream.aclose()
    events = await asyncio.wait_for(reading, DEADLINE_S)
    assert events[-1].finish_reason == "abort"
    assert events[-1].completion_tokens == stream.completion_tokens
    assert 4 <= stream.completion_tokens < 20
    await until(lambda: backend.state()["kv"]["blocks_used"] == 0)


async def test_a_reader_that_is_cancelled_frees(make):
    backend, runner = await make(free=False)
    stream = await open_stream(backend)
    reading = asyncio.ensure_future(read(stream))
    runner.allow(2)
    await until(lambda: stream.completion_tokens == 2)
    reading.cancel()
    await until(reading.done, runner)
    assert reading.cancelled()
    runner.allow()
    assert stream.completion_tokens < 20
    await until(lambda: backend.state()["kv"]["blocks_used"] == 0)


async def test_an_unread_stream_can_be_closed(make):
    backend, runner = await make(free=False)
    stream = await open_stream(backend)
    closing = asyncio.ensure_future(stream.aclose())
    await until(closing.done, runner)
    assert (await read(stream))[-1].finish_reason == "abort"


async def test_an_admins_words_reach_the_owner(make):
    backend, runner = await make(free=False)
    stream = await open_stream(backend)
    reading = asyncio.ensure_future(read(stream))
    runner.allow(2)
    await until(lambda: stream.completion_tokens == 2)
    assert backend.abort(stream.request_id, "An admin stopped this answer.")
    runner.allow()
    finished = (await asyncio.wait_for(reading, DEADLINE_S))[-1]
    assert (finished.finish_reason, finished.error) == ("abort", "An admin stopped this answer.")


async def test_aborting_twice_or_a_stranger_does_nothing_a01(make):
    backend, _ = await make()
    stream = await open_stream(backend)
    await read(stream)
    assert not backend.abort(stream.request_id)
    assert not backend.abort("never-was")


async def test_a_failing_row_fails_that_answer_only(make):
    backend, runner = await make(free=False)
    streams = [await open_stream(backend), await open_stream(backend)]
    runner.row_errors[streams[0].request_id] = "The scores were not numbers."
    runner.allow()
    failed, fine = [(await read(stream))[-1] for stream in streams]
    assert failed.finish_reason == "error"
    assert failed.error
    assert fine.finish_reason == "length"


# ---- refusals


@pytest.mark.parametrize(
    ("options", "kind", "param"),
    [
        ({"temperature": 9.0}, BadRequest, "temperature"),
        ({"prompt": ""}, BadRequest, "prompt"),
        ({"prompt": [999_999]}, BadRequest, "prompt"),
        ({"text": "x" * 400}, ContextLengthExceeded, "messages"),
        ({"model": "other"}, ModelNotFound, "model"),
    ],
)
async def test_requests_at_fault_are_refused_with_the_field(make, options, kind, param):
    backend, _ = await make()
    with pytest.raises(kind) as caught:
        await backend.prepare(request(**options))
    assert caught.value.param == param
    assert (await backend.prepare(request(model="fake"))).prompt_tokens


async def test_a_full_queue_says_when_to_come_again(make):
    backend, runner = await make(free=False)
    backend.tune({"max_waiting_requests": 1, "slots": 1})
    runner.allow(1)
    await until(lambda: backend.state()["settings"]["max_waiting_requests"]["effective"] == 1)
    streams = [await open_stream(backend, max_tokens=None)]
    await until(lambda: backend.state()["running"] == 1, runner)
    streams.append(await open_stream(backend))
    with pytest.raises(QueueIsFull) as caught:
        await open_stream(backend)
    assert caught.value.retry_after_s >= 1
    runner.allow()
    for stream in streams:
        await stream.aclose()


def all_kinds(kind):
    return {kind}.union(*(all_kinds(below) for below in kind.__subclasses__()))


def test_every_engine_error_has_its_place_in_the_table():
    import inference.engine
    import inference.model_store  # noqa: F401 - defines errors

    for kind in all_kinds(InferenceError) - {InferenceError}:
        place = next(above for above in kind.__mro__ if above in _ERRORS)
        assert place is not InferenceError, f"{kind.__name__} has no place"


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (engine_errors.PromptTooLong(10, 5), ContextLengthExceeded, 400),
        (engine_errors.QueueFull("Full.", retry_after_s=3.0), QueueIsFull, 503),
        (engine_errors.EngineStopping("Soon."), EngineUnavailable, 503),
        (engine_errors.EngineDead("Gone."), EngineUnavailable, 503),
        (engine_errors.RequestFailed("No.", request_id="r"), GenerationFailed, 500),
    ],
)
def test_engine_errors_keep_their_words(error, kind, status):
    turned = appliance_error(error)
    assert type(turned) is kind
    assert (turned.message, turned.status) == (str(error), status)
    assert isinstance(turned, ApplianceError)


# ---- state and life


async def test_the_state_is_json_and_adds_up(make):
    backend, runner = await make(free=False)
    streams = [await open_stream(backend, max_tokens=None) for _ in range(6)]
    await until(lambda: backend.state()["running"] == 4, runner)
    state = orjson.loads(orjson.dumps(backend.state()))
    kv = state["kv"]
    assert kv["blocks_used"] + kv["blocks_cached"] + kv["blocks_free"] == kv["blocks_total"] == 64
    assert state["slots"] == {"requested": 4, "effective": 4, "reason": ""}
    assert (state["state"], state["waiting"], state["step"] > 0) == ("ready", 2, True)
    assert state["model"]["name"] == "fake"
    assert state["model"]["context_tokens"] == 200
    assert {r["request_id"] for r in state["requests"]} == {s.request_id for s in streams}
    for key in ("prefill_tokens_per_s", "decode_tokens_per_s", "tokens_per_s", "step_host_ms"):
        assert state[key] >= 0
    found = backend.block_map()
    await until(lambda: len(backend.block_map()["cells"]) == 64)
    assert set(found) == {"step", "cells", "holders", "partial", "token_start"}
    assert orjson.dumps(backend.events_since(0), option=orjson.OPT_NON_STR_KEYS)
    runner.allow()
    for stream in streams:
        await stream.aclose()


async def test_slots_change_live(make):
    backend, _ = await make()
    backend.tune({"slots": 2})
    await until(lambda: backend.state()["slots"]["requested"] == 2)
    for changes in ({"slots": 0}, {"slots": "many"}, {"colour": 1}, {"slots": 3, "aging_s": -1}):
        with pytest.raises(BadRequest) as caught:
            backend.tune(changes)
        assert caught.value.param == list(changes)[-1]
    await read(await open_stream(backend))
    assert backend.state()["slots"]["requested"] == 2


async def test_what_is_tuned_while_loading_holds_afterwards(make, model_dir):
    go_on = threading.Event()

    def resolve(report):
        report(0.25, "importing the model")
        assert go_on.wait(DEADLINE_S)
        return model_dir

    backend, _ = await make(resolve=resolve, wait=False)
    await until(lambda: backend.state()["progress"][1] == "importing the model")
    assert backend.state()["state"] == "loading"
    assert backend.model is None
    with pytest.raises(EngineUnavailable) as caught:
        await backend.prepare(request())
    assert caught.value.retry_after_s
    backend.tune({"slots": 3})
    go_on.set()
    await until(lambda: backend.state()["slots"]["requested"] == 3)
    await until(lambda: backend.model is not None)


@pytest.mark.parametrize(
    "failure",
    [
        engine_errors.NotEnoughMemory("The weights need 10 GB; 2 GB are free."),
        OSError("read error"),
        ValueError("odd"),
    ],
)
async def test_a_model_that_cannot_be_loaded_is_a_dead_engine_with_its_reason(make, failure):
    backend, _ = await make(load_error=failure)
    state = backend.state()
    assert state["state"] == "dead"
    assert state["error"]
    assert backend.model is None
    with pytest.raises(EngineUnavailable):
        await backend.prepare(request())


async def test_a_model_that_cannot_be_found_is_a_dead_engine_with_its_reason(make):
    def resolve(report):
        raise engine_errors.ModelLoadError("There is no model 'x' in the store.")

    backend, _ = await make(resolve=resolve)
    assert backend.state()["error"] == "There is no model 'x' in the store."


async def test_ids_of_the_former_models_tokenizer_never_reach_the_next(make, model_dir):
    backend, runner = await make(free=False)
    prepared = await backend.prepare(request())
    running = await open_stream(backend)
    # What runs may finish; what still waits would end here.
    await until(lambda: backend.state()["running"] == 1, runner)
    backend.swap_model("fake", lambda report: model_dir, drain_s=30.0, on_loaded=lambda: None)
    runner.allow()
    assert (await read(running))[-1].finish_reason == "length"
    await until(lambda: (backend.state()["swap"] or {}).get("stage") == "done")
    with pytest.raises(EngineUnavailable, match="changed its model") as caught:
        await backend.generate(prepared)
    assert caught.value.retry_after_s
    assert (await read(await open_stream(backend)))[-1].finish_reason == "length"


async def test_while_the_model_is_changed_new_requests_are_told_when_to_come_again(make, model_dir):
    backend, runner = await make(free=False)
    stream = await open_stream(backend)
    prepared = await backend.prepare(request())
    await until(lambda: backend.state()["running"] == 1, runner)
    backend.swap_model("fake", lambda report: model_dir, drain_s=30.0, on_loaded=lambda: None)
    await until(lambda: backend.state()["state"] == "swapping")
    assert backend.model is None
    for attempt in (backend.prepare(request()), backend.generate(prepared)):
        with pytest.raises(EngineUnavailable, match="changing its model") as caught:
            await attempt
        assert caught.value.retry_after_s
    runner.allow()
    assert (await read(stream))[-1].finish_reason == "length"
    await until(lambda: backend.model is not None)


async def test_an_engine_that_failed_is_rebuilding_until_it_serves_again(make):
    backend, runner = await make(backoff_s=0.05)
    former = backend._supervisor.engine

    def fail(output):
        raise RuntimeError("boom")

    runner.before_step = fail
    while former.ending.error is None:
        with contextlib.suppress(EngineUnavailable):
            assert (await read(await open_stream(backend)))[-1].finish_reason == "error"
    runner.before_step = lambda output: None
    await until(lambda: backend.model is not None and backend._supervisor.engine is not former)
    assert (await read(await open_stream(backend)))[-1].finish_reason == "length"
    kinds = [event["kind"] for event in backend.events_since(0)]
    assert "engine_failed" in kinds
    assert "engine_rebuilt" in kinds
    ids = [event["event_id"] for event in backend.events_since(0)]
    assert ids == sorted(set(ids)), "events go on counting over the engines"


async def test_a_stop_lets_running_answers_finish_and_ends_waiting_ones_d08(make):
    backend, runner = await make(free=False)
    readers = [
        asyncio.ensure_future(read(await open_stream(backend, max_tokens=None))) for _ in range(6)
    ]
    await until(lambda: backend.state()["running"] == 4, runner)
    stopping = asyncio.ensure_future(backend.stop(DEADLINE_S))
    await until(lambda: backend.state()["state"] == "draining")
    with pytest.raises(EngineUnavailable):
        await open_stream(backend)
    runner.allow()
    ends = [(await reader)[-1] for reader in readers]
    await stopping
    assert [end.finish_reason for end in ends[:4]] == ["length"] * 4
    assert [end.error_code for end in ends] == [None] * 4 + ["engine_unavailable"] * 2
    assert all(end.error and "stopping" in end.error for end in ends[4:])
    assert [end.prompt_tokens for end in ends[4:]] == [0, 0]
    assert runner.is_closed


async def test_a_stop_without_grace_ends_running_answers_d08(make):
    backend, runner = await make(free=False)
    stream = await open_stream(backend)
    reading = asyncio.ensure_future(read(stream))
    runner.allow(3)
    await until(lambda: stream.completion_tokens == 3)
    stopping = asyncio.ensure_future(backend.stop(0.0))
    await until(stopping.done, runner)
    end = (await asyncio.wait_for(reading, DEADLINE_S))[-1]
    assert end.finish_reason in ("abort", "error")
    assert end.error
    assert (end.error_code, end.prompt_tokens) == (None, stream.prompt_tokens)


async def test_progress_events_come_for_long_prompts(make):
    backend, runner = await make(free=False, budget=16)
    events = each(await open_stream(backend, "x" * 120))
    next_event = asyncio.ensure_future(anext(events))
    await until(next_event.done, runner)
    event = next_event.result()
    while isinstance(event, Queued):
        runner.allow(1)
        event = await asyncio.wait_for(anext(events), DEADLINE_S)
    assert isinstance(event, Reading)
    assert 0 < event.done_tokens <= event.prompt_tokens
    runner.allow()
    await events.aclose()
