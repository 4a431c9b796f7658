"""Shares of service of the classes: strict order as it was, and weights with their bound."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.config import InvalidConfig
from inference.engine import Engine
from inference.request import RequestClass
from inference.scheduling.settings import SchedulerSettings
from tests.inference.helpers import FakeRunner, Harness, fake_config, make_request
from tests.inference.test_fairness import NO_AGING, service

INTERACTIVE, API, BACKGROUND = RequestClass
EVEN = {"interactive": 1, "api": 1, "background": 1}


def of_class(request_class, count, prompt=10, max_tokens=10, **fields):
    return [
        make_request(
            prompt, max_tokens, request_class=request_class, owner=request_class.value, **fields
        )
        for _ in range(count)
    ]


def starts(harness):
    return [request.request_class for request in harness.started]


def run_steps(harness, count):
    for _ in range(count):
        harness.step()


def test_the_order_is_strict_unless_weights_are_set():
    assert SchedulerSettings().class_weights == "strict"
    harness = Harness(slots=1, aging_s=NO_AGING)
    lines = [of_class(each, 3, max_tokens=2) for each in (BACKGROUND, API, INTERACTIVE)]
    harness.add(*(request for line in lines for request in line))
    told = harness.scheduler.waiting.order(100)
    harness.run()
    assert starts(harness) == [INTERACTIVE] * 3 + [API] * 3 + [BACKGROUND] * 3
    assert told == harness.started


sizes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=15, max_size=30)
weights = st.sampled_from([0.5, 1, 2.0, 4])


@settings(max_examples=25, deadline=None)
@given(
    st.tuples(sizes, sizes, sizes), st.tuples(weights, weights, weights), st.sampled_from([1, 3])
)
def test_service_of_classes_that_wait_never_differs_by_more_than_the_bound(lines, shares, slots):
    """As between owners (arXiv:2401.00588): at most what one prompt and one batch can add."""
    named = dict(zip(EVEN, shares, strict=True))
    # Blocks for all that run, since a class of the lowest rank would be preempted.
    harness = Harness(num_blocks=24, slots=slots, aging_s=NO_AGING, class_weights=named)
    classes = [
        [make_request(p, n, request_class=each, owner=f"{each}{k % 3}") for k, (p, n) in line]
        for each, line in zip(RequestClass, map(list, map(enumerate, lines)), strict=True)
    ]
    harness.add(*(request for line in classes for request in line))
    longest = 40 + 2 * 20 * slots
    while all(any(r.first_scheduled_s is None for r in line) for line in classes):
        got = [service(line) / weight for line, weight in zip(classes, shares, strict=True)]
        assert max(got) - min(got) <= longest / min(shares)
        harness.step()


def test_a_class_gets_service_by_its_weight_under_load():
    harness = Harness(
        num_blocks=16,
        slots=4,
        aging_s=NO_AGING,
        class_weights={"interactive": 6, "api": 3, "background": 1},
    )
    lines = [of_class(each, 200) for each in RequestClass]
    harness.add(*(request for line in lines for request in line))
    run_steps(harness, 500)
    chat, script, background = map(service, lines)
    assert chat / background == pytest.approx(6, rel=0.15)
    assert script / background == pytest.approx(3, rel=0.15)


def test_a_class_that_is_not_named_weighs_one():
    harness = Harness(num_blocks=16, slots=4, aging_s=NO_AGING, class_weights={"interactive": 2})
    lines = [of_class(each, 200) for each in (INTERACTIVE, API)]
    harness.add(*(request for line in lines for request in line))
    run_steps(harness, 400)
    assert service(lines[0]) / service(lines[1]) == pytest.approx(2, rel=0.15)


def test_the_line_that_is_told_is_the_order_of_the_starts_with_weights():
    harness = Harness(slots=1, aging_s=NO_AGING, class_weights={"interactive": 2, "api": 1})
    # One token each, so that prompts alone are charged but for two a request.
    lines = [of_class(each, 12, prompt=100, max_tokens=1) for each in (API, INTERACTIVE)]
    harness.add(*(request for line in lines for request in line))
    told = harness.scheduler.waiting.order(9)
    harness.run()
    assert [request.request_class for request in told] == starts(harness)[:9]
    assert starts(harness)[:9].count(INTERACTIVE) == 6


def test_a_class_without_requests_saves_up_no_credit():
    harness = Harness(slots=1, aging_s=NO_AGING, class_weights=EVEN)
    harness.add(*of_class(API, 60, max_tokens=4))
    run_steps(harness, 100)
    num_before = len(harness.started)
    harness.add(*of_class(BACKGROUND, 30, max_tokens=4))
    run_steps(harness, 40)
    since = starts(harness)[num_before:]
    assert abs(since.count(API) - since.count(BACKGROUND)) <= 1


def test_what_was_served_in_strict_order_is_no_debt_under_weights():
    harness = Harness(slots=1, aging_s=NO_AGING)
    harness.add(*of_class(INTERACTIVE, 60, max_tokens=4), *of_class(API, 60, max_tokens=4))
    run_steps(harness, 100)
    assert API not in starts(harness)
    num_before = len(harness.started)
    harness.tune(class_weights=EVEN)
    run_steps(harness, 40)
    since = starts(harness)[num_before:]
    assert abs(since.count(INTERACTIVE) - since.count(API)) <= 1


def test_a_class_that_could_not_use_its_turns_does_not_shut_out_the_others_later():
    """At their owner's cap, or while only slots kept for chat are free, requests just wait."""
    harness = Harness(slots=2, aging_s=NO_AGING, class_weights=EVEN, max_running_per_owner=1)
    harness.add(*of_class(API, 40, max_tokens=30))
    harness.step()
    for n in range(400):
        harness.add(make_request(40, 1, request_class=INTERACTIVE, owner=f"chat{n}"))
    run_steps(harness, 150)
    num_before = len(harness.started)
    harness.tune(max_running_per_owner=0)
    run_steps(harness, 150)
    assert starts(harness)[num_before : num_before + 12].count(INTERACTIVE) >= 4


def test_aging_and_reserved_slots_hold_with_weights():
    heavy = {"interactive": 0.01, "api": 100, "background": 0.01}
    harness = Harness(slots=2, reserved_interactive_slots=1, aging_s=20.0, class_weights=heavy)
    harness.add(*of_class(API, 80, max_tokens=5))
    chat, late = *of_class(INTERACTIVE, 1), *of_class(BACKGROUND, 1)
    harness.add(chat, late)
    harness.step()
    assert chat.first_scheduled_s is not None, "the slot is kept for it"
    run_steps(harness, 30)
    assert late.first_scheduled_s is not None, "it waited the aging time"


def test_the_lowest_class_makes_room_whatever_its_weight():
    harness = Harness(
        num_blocks=8, slots=4, enable_prefix_cache=False, class_weights={"background": 100}
    )
    background, chat = *of_class(BACKGROUND, 1, 30, 60), *of_class(INTERACTIVE, 1, 30, 60)
    harness.add(background, chat)
    harness.run()
    assert (background.num_preemptions > 0, chat.num_preemptions) == (True, 0)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "strict"),
        ("fair", "interactive, api, background"),
        ({}, "interactive, api, background"),
        ([1, 2, 3], "interactive, api, background"),
        ({"chat": 2}, "'chat'"),
        ({1: 2}, "names the class 1"),
        ({"api": 0}, r"class_weights\[api\] is 0"),
        ({"api": "2"}, r"class_weights\[api\]"),
        ({"api": True}, r"class_weights\[api\]"),
        ({"api": float("nan")}, r"class_weights\[api\]"),
    ],
)
def test_bad_weights_are_refused_with_what_is_allowed(value, told):
    engine = Engine(fake_config(), FakeRunner())
    with pytest.raises(InvalidConfig, match=told):
        engine.tune(class_weights=value)


def test_weights_are_shown_with_what_holds_and_told_as_an_event():
    engine = Engine(fake_config(), FakeRunner())
    engine.load()
    shown = engine.stats().settings["class_weights"]
    assert (shown.requested, shown.effective, shown.reason) == ("strict", "strict", "")
    engine.tune(class_weights={"interactive": 4, "api": 1.5})
    engine.step()
    shown = engine.stats().settings["class_weights"]
    assert shown.requested == {"interactive": 4, "api": 1.5}
    assert shown.effective == {"interactive": 4, "api": 1.5, "background": 1.0}
    assert "weighs 1" in shown.reason
    assert engine.events_since(0)[-1].data == {"class_weights": "interactive 4, api 1.5"}
    engine.tune(class_weights="strict")
    engine.step()
    assert engine.stats().settings["class_weights"].effective == "strict"
    engine.shutdown(0.0)
