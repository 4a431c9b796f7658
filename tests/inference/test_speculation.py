"""Lookahead: the same answers in fewer steps, and never more than a step has left."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.config import EngineConfig
from inference.engine import Engine
from inference.outputs import ScheduledRequest, SchedulerOutput, StepOutput, TokenOutput
from inference.request import FinishReason, Request
from inference.runner.model_runner import ModelRunner
from inference.sampling_params import SamplingParams
from inference.scheduling import speculation as module
from inference.scheduling.speculation import Speculation, accept_draft, is_exact
from tests.inference.helpers import EOS, FakeRunner, Harness, fake_config, make_request
from tests.inference.tiny_models import save_tiny_model

WORDS = [50, 51, 52, 53, 54, 55, 56]


class EchoRunner(FakeRunner):
    """A model that goes round in circles, with a slip now and then: it depends on all it reads."""

    def _sample(self, request: Request, context: list[int]) -> TokenOutput:
        slip = sum(context) % 11 == 0
        period = min(3 + request.prompt_token_ids[0] % 4, len(context))
        return TokenOutput(900 if slip else context[-period])


class EchoHarness(Harness):
    def __init__(self, **changes: object) -> None:
        super().__init__(**{"max_num_batched_tokens": 512, **changes})  # type: ignore[arg-type]
        pool = self.kv.pool.num_blocks
        self.runner = EchoRunner(num_blocks=pool, block_size=self.kv.block_size)


def serve(speculation: str, prompts: Sequence[Sequence[int]], **changes: object):
    """Outputs, number of steps, and the harness."""
    max_tokens = changes.pop("max_tokens", 60)
    params = changes.pop("params", {})
    harness = EchoHarness(speculation=speculation, **changes)
    requests = [
        make_request(prompt, max_tokens, cache_scope=f"u{at}", **params)  # type: ignore[arg-type]
        for at, prompt in enumerate(prompts)
    ]
    harness.add(*requests)
    num_steps = harness.run()
    return requests, num_steps, harness


def outputs(requests: Sequence[Request]) -> list[list[int]]:
    return [request.output_token_ids for request in requests]


PROMPTS = [[60 + at, *WORDS * 3] for at in range(5)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"slots": 1},
        {"num_blocks": 14},
        {"block_size": 4},
        {"enable_prefix_cache": False},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 2},
        {"max_tokens": 1},
        {"params": {"stop_token_ids": (900,)}},
        {"params": {"ignore_eos": True}},
    ],
)
def test_answers_are_the_same_with_it_and_without(changes) -> None:
    off, num_off, _ = serve("off", PROMPTS, **changes)
    on, num_on, harness = serve("on", PROMPTS, **changes)
    assert outputs(on) == outputs(off)
    assert [r.finish_reason for r in on] == [r.finish_reason for r in off]
    assert num_on <= num_off
    assert harness.kv.pool.num_used == 0


def test_fewer_steps_are_needed_alone_and_in_a_batch() -> None:
    for prompts in (PROMPTS[:1], PROMPTS):
        _, num_off, _ = serve("off", prompts, slots=8)
        _, num_on, harness = serve("on", prompts, slots=8)
        assert num_on < 0.7 * num_off
        drafted = [part for output in harness.runner.outputs for part in output.scheduled]
        assert max(len(part.draft_token_ids) for part in drafted) == module.MAX_DRAFT


def test_preemption_and_a_second_round_from_the_cache_change_nothing() -> None:
    calm, _, _ = serve("off", PROMPTS, num_blocks=64)
    hurried, _, harness = serve("on", PROMPTS, num_blocks=13, max_tokens=60)
    assert harness.num_preempted > 0
    assert outputs(hurried) == outputs(calm)
    _, _, roomy = serve("on", PROMPTS)
    again = make_request([*PROMPTS[0], *calm[0].output_token_ids], 40, cache_scope="u0")
    roomy.add(again)
    roomy.run()
    [whole], _, _ = serve("off", PROMPTS[:1], max_tokens=100)
    assert again.output_token_ids == whole.output_token_ids[60:]
    assert again.num_cached_tokens > 0


def test_an_end_within_a_draft_ends_there_and_counts_what_was_said() -> None:
    class Ending(EchoRunner):
        def _sample(self, request: Request, context: list[int]) -> TokenOutput:
            return TokenOutput(EOS if len(context) == 31 else context[-len(WORDS)])

    prompt = WORDS * 3
    # The end token stands where a draft may have it too.
    prompt[9:9] = [EOS]
    harness = EchoHarness(speculation="on")
    harness.runner = Ending(num_blocks=64)
    request = make_request(prompt, 60)
    harness.add(request)
    harness.run()
    assert request.finish_reason is FinishReason.STOP
    assert request.output_token_ids.count(EOS) == 1
    assert request.output_token_ids[-1] == EOS
    assert request.num_tokens <= 32


prompts = st.lists(
    st.lists(st.sampled_from([50, 51, 52, 61]), min_size=4, max_size=30), min_size=1, max_size=6
)


@settings(max_examples=60, deadline=None)
@given(
    prompts,
    st.integers(1, 30),
    st.sampled_from([3, 8, 40]),
    st.sampled_from([9, 20, 64]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["on", "auto"]),
)
def test_whatever_comes_together_nobody_notices(
    prompts, max_tokens, budget, num_blocks, slots, asked
) -> None:
    """The harness checks blocks and budget after every step."""
    changes = {
        "max_tokens": max_tokens,
        "num_blocks": num_blocks,
        "block_size": 8,
        "max_num_batched_tokens": budget,
        "slots": slots,
    }
    off, _, _ = serve("off", prompts, **changes)
    on, _, harness = serve(asked, prompts, **changes)
    assert outputs(on) == outputs(off)
    for output in harness.runner.outputs:
        if any(part.draft_token_ids for part in output.scheduled):
            # Nobody's prompt waits behind a guess.
            assert all(part.samples for part in output.scheduled)


def test_a_draft_preempts_nobody() -> None:
    off, _, without = serve("off", PROMPTS, num_blocks=13)
    on, _, with_it = serve("on", PROMPTS, num_blocks=13)
    assert outputs(on) == outputs(off)
    assert with_it.num_preempted <= without.num_preempted + 1


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"repetition_penalty": 1.1},
        {"logit_bias": {5: 1.0}},
        {"min_tokens": 3},
        {"logprobs": 0},
    ],
)
def test_only_plain_greedy_requests_are_guessed_for(params) -> None:
    assert is_exact(SamplingParams(temperature=0.0))
    assert is_exact(SamplingParams(temperature=1.0, top_k=1))
    assert not is_exact(SamplingParams(**{"temperature": 0.0, **params}))


def test_a_draft_is_taken_up_to_the_first_difference() -> None:
    said = [TokenOutput(n) for n in (5, 6, 9, 8)]
    assert accept_draft([5, 6, 7], said) == (2, said[2])
    assert accept_draft([], said[:1]) == (0, said[0])
    broken = [TokenOutput(5), TokenOutput(-1, error="none"), TokenOutput(7)]
    assert accept_draft([5, -1], broken) == (1, broken[1])


# ---- auto


def told(speculation: Speculation, step_s: float, drafted: int = 0, accepted: int = 0) -> None:
    request = make_request(8)
    part = ScheduledRequest(request, 7, 1 + drafted, [0], samples=True)
    part.draft_token_ids = [1] * drafted
    step = SchedulerOutput(1, [part], part.num_new_tokens)
    speculation.on_step(
        step, StepOutput({}, num_accepted={request.request_id: accepted}, forward_s=step_s)
    )


def asks(speculation: Speculation) -> bool:
    return speculation._rates_of(1).wants_draft()


@pytest.mark.parametrize(("draft_s", "is_faster"), [(1.2, True), (3.0, False)])
def test_auto_goes_by_what_was_measured(draft_s: float, is_faster: bool) -> None:
    speculation = Speculation()
    assert not asks(speculation)
    for _ in range(4):
        told(speculation, 1.0)
    for _ in range(8):
        assert asks(speculation)
        told(speculation, draft_s, drafted=4, accepted=1)
    assert asks(speculation) is is_faster
    shown = speculation.setting
    assert (shown.requested, shown.effective) == ("auto", "on" if is_faster else "off")
    assert f"{2 / draft_s:.2f} times" in shown.reason


def test_auto_tries_again_after_a_while_and_looks_without_now_and_then() -> None:
    speculation = Speculation()
    for _ in range(4):
        told(speculation, 1.0)
    for _ in range(8):
        told(speculation, 3.0, drafted=4)
    tries = [asks(speculation) for _ in range(400)]
    assert not any(tries[:200])
    assert any(tries)
    for _ in range(8):
        told(speculation, 1.0, drafted=4, accepted=4)
    later = [asks(speculation) for _ in range(64)]
    assert later.count(False) == 2


def test_a_request_whose_guesses_are_wrong_pauses() -> None:
    class Never(EchoRunner):
        def _sample(self, request: Request, context: list[int]) -> TokenOutput:
            # The same three words lead to another one each time.
            return TokenOutput([50, 51, 52, 100 + len(context)][len(context) % 4])

    harness = EchoHarness(speculation="on")
    harness.runner = Never(num_blocks=64)
    harness.add(make_request([50, 51, 52, 99] * 4, 200))
    harness.run()
    drafts = [part for output in harness.runner.outputs for part in output.scheduled]
    assert 0 < sum(bool(part.draft_token_ids) for part in drafts) < 25


# ---- the engine


def test_the_setting_is_live_and_counted() -> None:
    runner = EchoRunner()
    engine = Engine(fake_config(), runner)
    engine.load()
    for asked in ("on", "off"):
        engine.tune(speculation=asked)
        before = dict(engine.stats().totals)
        stream = engine.add_request(make_request(PROMPTS[0], 50))
        while engine.step():
            pass
        engine.step()
        totals = engine.stats().totals
        assert engine.stats().settings["speculation"].effective == asked
        got = totals["draft_tokens_proposed"] - before.get("draft_tokens_proposed", 0)
        assert bool(got) is (asked == "on")
        assert totals["draft_tokens_accepted"] <= totals["draft_tokens_proposed"]
        assert totals["generated_tokens"] - before.get("generated_tokens", 0) == 50
        assert len(stream.get(1.0).token_ids) == 50
    engine.shutdown(0.0)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_real_model_says_the_same(family: str, tmp_path: Path) -> None:
    """In fp32, whole model: a wrong row, position or block would change what is most likely."""
    torch.set_num_threads(1)
    folder = tmp_path / family
    save_tiny_model(family, folder)
    answers, totals = {}, {}
    for asked in ("off", "on"):
        config = EngineConfig(
            model_dir=folder,
            device="cpu",
            dtype="float32",
            num_blocks=60,
            block_size=8,
            num_threads=1,
        )
        engine = Engine(config, ModelRunner(config))
        engine.load()
        engine.tune(speculation=asked)
        requests = [
            make_request([5 + at, 9, 40, 7, 9, 40, 7, 9, 40], 60, ignore_eos=True)
            for at in range(3)
        ]
        for request in requests:
            engine.add_request(request)
        while engine.step():
            engine._scheduler.check_integrity()
        engine.step()
        answers[asked], totals[asked] = outputs(requests), engine.stats().totals
        engine.shutdown(0.0)
    assert answers["on"] == answers["off"]
    assert totals["on"]["draft_tokens_proposed"] > 0
    if family == "llama":
        assert totals["on"]["draft_tokens_accepted"] > 0
        assert totals["on"]["steps"] < totals["off"]["steps"]
