"""What the engine refuses before it is queued, and with which words."""

import re
from dataclasses import replace

import pytest

from inference.engine import Engine
from inference.errors import (
    InvalidPrompt,
    InvalidSamplingParams,
    PromptTooLong,
    QueueFull,
    RequestRejected,
)
from inference.request import FinishReason
from tests.inference.engine_driving import collect, step_out
from tests.inference.helpers import VOCAB_SIZE, FakeRunner, fake_config, make_request


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
