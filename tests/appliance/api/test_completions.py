"""/v1/completions and /v1/models."""

from typing import Any

import pytest

from tests.appliance.api.asgi_caller import Answer, Caller
from tests.appliance.fake_backend import FakeBackend

TEXT = "Paris is the capital."


async def complete(caller: Caller, prompt: Any, **fields: Any) -> Answer:
    return await caller.post("/v1/completions", {"model": "scripted", "prompt": prompt, **fields})


async def test_a_whole_completion(caller: Caller) -> None:
    body = await (await complete(caller, "one two")).json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["usage"]["total_tokens"] == 7


async def test_b01_a_streamed_completion_has_no_usage_unless_asked(caller: Caller) -> None:
    for options in (None, {}, {"include_usage": False}):
        answer = await complete(caller, "one two", stream=True, stream_options=options)
        *frames, done = await answer.events()
        assert done == "[DONE]"
        assert all(frame["choices"] and "usage" not in frame for frame in frames)


async def test_b01_a_streamed_completion_joins_to_the_whole_one(caller: Caller) -> None:
    answer = await complete(caller, "one two", stream=True, stream_options={"include_usage": True})
    *frames, usage, done = await answer.events()
    assert done == "[DONE]"
    assert "".join(frame["choices"][0]["text"] for frame in frames) == TEXT
    reasons = [frame["choices"][0]["finish_reason"] for frame in frames]
    assert reasons == [None] * (len(frames) - 1) + ["stop"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5


async def test_without_max_tokens_sixteen_are_made(caller: Caller, backend: FakeBackend) -> None:
    await (await complete(caller, "one")).json()
    assert backend.requests[0].options.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "seen"),
    [
        ("one", ["one"]),
        (["one"], ["one"]),
        (["one", "two"], ["one", "two"]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_every_form_of_prompt(
    caller: Caller, backend: FakeBackend, prompt: Any, seen: list[Any]
) -> None:
    body = await (await complete(caller, prompt)).json()
    assert [request.prompt for request in backend.requests] == seen
    assert [choice["index"] for choice in body["choices"]] == list(range(len(seen)))


@pytest.mark.parametrize(
    "prompt", ["", [], [""], ["a", ""], [[]], None, 5, [1.5], [True], {"a": 1}, [["a"]]]
)
async def test_a12_a13_an_empty_or_odd_prompt_is_400(
    caller: Caller, backend: FakeBackend, prompt: Any
) -> None:
    answer = await complete(caller, prompt)
    body = await answer.json()
    assert answer.status == 400
    assert body["error"]["param"].startswith("prompt")
    assert backend.requests == []


async def test_several_prompts_and_choices_count_every_prompt_once(caller: Caller) -> None:
    body = await (await complete(caller, ["one two", "three"], n=2)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 20


async def test_echo_repeats_the_prompt_streamed_or_not(caller: Caller) -> None:
    body = await (await complete(caller, "one two", echo=True)).json()
    assert body["choices"][0]["text"] == "one two" + TEXT
    *frames, _ = await (await complete(caller, "one two", echo=True, stream=True)).events()
    assert "".join(frame["choices"][0]["text"] for frame in frames) == "one two" + TEXT


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"n": 9}, "n"),
        ({"prompt": ["a"] * 9}, "prompt"),
        ({"prompt": [1, 2], "echo": True}, "echo"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_what_is_not_supported_says_so(
    caller: Caller, fields: dict[str, Any], param: str
) -> None:
    answer = await complete(caller, **{"prompt": "one", **fields})
    body = await answer.json()
    assert (answer.status, body["error"]["param"]) == (400, param)


async def test_a22_logprobs_streamed_and_whole_are_the_same(
    caller: Caller, backend: FakeBackend
) -> None:
    backend.logprobs = ("Pa", b"Pa", -0.5, (("Pa", b"Pa", -0.5),))
    whole = await (await complete(caller, "one", logprobs=0)).json()
    kept = whole["choices"][0]["logprobs"]
    assert kept["text_offset"] == [0, 2, 4, 6, 8]
    assert kept["token_logprobs"] == [-0.5] * 5
    streamed: dict[str, list[Any]] = {name: [] for name in kept}
    for frame in (await (await complete(caller, "one", logprobs=0, stream=True)).events())[:-1]:
        for name, values in (frame["choices"][0]["logprobs"] or {}).items():
            streamed[name] += values
    assert streamed == kept


@pytest.mark.parametrize(
    ("priority", "seen"), [(None, "api"), (0, "api"), (-5, "api"), (1, "background")]
)
async def test_a_caller_may_stand_back_but_never_get_ahead(
    caller: Caller, backend: FakeBackend, priority: int | None, seen: str
) -> None:
    for answer in (
        await complete(caller, "one", priority=priority),
        await caller.chat(priority=priority),
    ):
        assert (await answer.ended()).status == 200
    assert [request.generation_class for request in backend.requests] == [seen, seen]


async def test_a_priority_is_a_whole_number(caller: Caller) -> None:
    for wrong in ("high", 1.5, True):
        body = await (await caller.chat(priority=wrong)).json()
        assert body["error"]["param"] == "priority"


async def test_models_lists_the_loaded_one_and_shows_it(caller: Caller) -> None:
    listed = await (await caller.get("/v1/models")).json()
    shown = await (await caller.get("/v1/models/scripted")).json()
    assert listed == {"object": "list", "data": [shown]}
    assert shown["id"] == "scripted"
    assert shown["created"] == 1_700_000_000


async def test_b17_head_has_the_headers_of_get_and_no_body(caller: Caller) -> None:
    got = await caller.get("/v1/models")
    await got.json()
    head = await caller.send("HEAD", "/v1/models").start()
    assert head.status == 200
    assert head.headers["content-length"] == got.headers["content-length"]
    assert await head.chunk() == b""
    assert await head.chunk() is None
