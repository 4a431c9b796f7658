"""/v1/chat/completions: whole and streamed answers."""

import pytest

from appliance.quotas.models import UsageRecord
from appliance.serving.booking import bookings_wait, in_db_thread
from tests.appliance.api.asgi_caller import DEADLINE_S, Caller
from tests.appliance.fake_backend import FakeBackend, FakePrepared, FakeStream

TEXT = "Paris is the capital."


async def test_a_whole_answer_has_text_reason_and_usage(caller: Caller) -> None:
    answer = await caller.chat()
    body = await answer.json()
    assert answer.status == 200
    assert answer.headers["content-length"] == str(len(answer.body))
    assert body["object"] == "chat.completion"
    assert body["model"] == "scripted"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert body["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 5,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_b02_a_stream_has_one_role_text_with_null_reasons_one_end_and_done(
    caller: Caller,
) -> None:
    answer = await caller.chat(stream=True)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-length" not in answer.headers
    *frames, done = await answer.events()
    assert done == "[DONE]"
    assert len({(frame["id"], frame["created"]) for frame in frames}) == 1
    assert all(frame["object"] == "chat.completion.chunk" for frame in frames)
    choices = [frame["choices"][0] for frame in frames]
    assert choices[0]["delta"] == {"role": "assistant"}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert choices[-1]["delta"] == {}
    texts = [choice["delta"]["content"] for choice in choices[1:-1]]
    assert "".join(texts) == TEXT
    assert all(texts)


async def test_deltas_that_are_ready_together_travel_in_one_frame(
    caller: Caller, backend: FakeBackend
) -> None:
    backend.words = ["word "] * 300
    backend.events_at_once = 30
    *frames, _ = await (await caller.chat(stream=True)).events()
    texts = [frame["choices"][0]["delta"].get("content", "") for frame in frames]
    assert "".join(texts) == "word " * 300
    assert len(frames) == 13


async def test_a_delta_is_sent_at_once_when_nothing_more_is_ready(
    caller: Caller, backend: FakeBackend
) -> None:
    backend.hold(after=2)
    answer = await caller.chat(stream=True)
    await answer.event()
    text = ""
    while text != "Paris is":
        text += (await answer.event())["choices"][0]["delta"]["content"]
    backend.release()
    assert (await answer.events())[-1] == "[DONE]"


async def test_b04_either_name_of_the_limit_is_kept_and_the_newer_wins(
    caller: Caller, backend: FakeBackend
) -> None:
    for fields in (
        {"max_completion_tokens": 2},
        {"max_tokens": 2},
        {"max_completion_tokens": 2, "max_tokens": 50},
        {"max_completion_tokens": 2, "max_tokens": 1},
        {"max_completion_tokens": None, "max_tokens": 2},
    ):
        body = await (await caller.chat(**fields)).json()
        assert body["choices"][0]["message"]["content"] == "Paris is"
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 2
    whole = await (await caller.chat(max_completion_tokens=None, max_tokens=None)).json()
    assert whole["choices"][0]["finish_reason"] == "stop"


async def test_b01_usage_comes_only_when_asked_for_once_and_right_before_done(
    caller: Caller,
) -> None:
    for options in (None, {}, {"include_usage": False}):
        frames = await (await caller.chat(stream=True, stream_options=options)).events()
        assert all(frame["choices"] for frame in frames[:-1])
        assert not any("usage" in frame for frame in frames[:-1])
    whole = await (await caller.chat(max_tokens=3)).json()
    asked = await caller.chat(stream=True, stream_options={"include_usage": True}, max_tokens=3)
    *frames, usage, done = await asked.events()
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert all(frame["choices"] and not frame.get("usage") for frame in frames)


async def test_b02_several_choices_each_have_one_role_and_one_end(
    caller: Caller, backend: FakeBackend
) -> None:
    answer = await caller.chat(
        stream=True, n=3, max_tokens=4, seed=7, stream_options={"include_usage": True}
    )
    *frames, usage, done = await answer.events()
    assert done == "[DONE]"
    for index in range(3):
        own = [f["choices"][0] for f in frames if f["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant"}
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["length"]
        assert own[-1]["finish_reason"] == "length"
        assert "".join(c["delta"].get("content", "") for c in own) == "Paris is the capital"
    assert usage["usage"]["prompt_tokens"] == 6
    assert usage["usage"]["completion_tokens"] == 12
    assert [request.options.seed for request in backend.requests] == [7, 8, 9]


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 2])
async def test_b02_the_first_and_the_last_seed_go_with_two_choices(
    caller: Caller, backend: FakeBackend, seed: int
) -> None:
    assert (await caller.chat(n=2, seed=seed)).status == 200
    assert [request.options.seed for request in backend.requests] == [seed, seed + 1]


async def test_b02_choices_that_end_apart_each_end_once_and_usage_adds_them_up(
    caller: Caller, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = backend.generate

    async def generate(prepared: FakePrepared) -> FakeStream:
        stream = await real(prepared)
        stream.limit = {1: 2, 2: 100, 3: 4}[len(backend.requests)]
        return stream

    monkeypatch.setattr(backend, "generate", generate)
    answer = await caller.chat(stream=True, n=3, stream_options={"include_usage": True})
    *frames, usage, done = await answer.events()
    assert done == "[DONE]"
    ends = [
        (choice["index"], choice["finish_reason"])
        for frame in frames
        for choice in frame["choices"]
        if choice["finish_reason"]
    ]
    assert sorted(ends) == [(0, "length"), (1, "stop"), (2, "length")]
    assert usage["usage"]["completion_tokens"] == 2 + 5 + 4
    assert usage["usage"]["prompt_tokens"] == 6


async def test_several_choices_come_in_order_in_a_whole_answer(caller: Caller) -> None:
    body = await (await caller.chat(n=2)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 10
    assert body["usage"]["prompt_tokens"] == 6


async def test_every_choice_has_its_row_in_the_ledger(caller: Caller) -> None:
    await (await caller.chat(n=2)).json()
    assert await bookings_wait(DEADLINE_S) == 0
    rows = await in_db_thread(list, UsageRecord.objects.all())
    assert [(row.source, row.username, row.end) for row in rows] == [("api", "bob", "stop")] * 2
    assert all(row.key_id and row.key_prefix.startswith("bh_") for row in rows)


async def test_a22_logprobs_streamed_and_whole_are_the_same(
    caller: Caller, backend: FakeBackend
) -> None:
    token = ("Paris", b"Paris", -0.5, (("Paris", b"Paris", -0.5), ("Rome", b"Rome", float("-inf"))))
    backend.logprobs = token
    whole = await (await caller.chat(logprobs=True, top_logprobs=2)).json()
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == whole["usage"]["completion_tokens"]
    assert content[0]["token"] == "Paris"
    assert bytes(content[0]["bytes"]) == b"Paris"
    assert content[0]["top_logprobs"][1] == {
        "token": "Rome",
        "logprob": -9999.0,
        "bytes": list(b"Rome"),
    }
    frames = await (await caller.chat(logprobs=True, top_logprobs=2, stream=True)).events()
    streamed = [
        entry
        for frame in frames[:-1]
        for entry in (frame["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content
    assert backend.requests[-1].options.logprobs == 2


async def test_a22_zero_alternatives_is_not_off(caller: Caller, backend: FakeBackend) -> None:
    await (await caller.chat(logprobs=True)).json()
    assert backend.requests[-1].options.logprobs == 0
    await (await caller.chat()).json()
    assert backend.requests[-1].options.logprobs is None


async def test_every_sampling_option_reaches_the_back_end(
    caller: Caller, backend: FakeBackend
) -> None:
    await (
        await caller.chat(
            temperature=0.5,
            top_p=0.9,
            top_k=-1,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            logit_bias={"5": -100, "7": 1.5},
            seed=42,
            stop=["a", "b"],
            stop_token_ids=[3],
            min_tokens=1,
            ignore_eos=True,
        )
    ).json()
    options = backend.requests[0].options
    assert (options.temperature, options.top_p, options.top_k, options.min_p) == (0.5, 0.9, 0, 0.1)
    assert options.logit_bias == {5: -100, 7: 1.5}
    assert (options.seed, options.stop, options.stop_token_ids) == (42, ("a", "b"), (3,))
    assert (options.min_tokens, options.ignore_eos) == (1, True)
    penalties = (
        options.repetition_penalty,
        options.presence_penalty,
        options.frequency_penalty,
    )
    assert penalties == (1.1, 0.2, 0.3)
    await (await caller.chat(stop="x")).json()
    assert backend.requests[1].options.stop == ("x",)
