"""Why a request waits is told as the scheduler decides it, and the context limit is live."""

import pytest

from inference.engine_checks import check_request
from inference.errors import PromptTooLong
from inference.request import FinishReason, Request, RequestClass
from inference.scheduling.waits import waits
from tests.inference.helpers import FakeRunner, Harness, make_request

CHAT, API = RequestClass.INTERACTIVE, RequestClass.API


def told(harness: Harness) -> dict[Request, dict]:
    line = harness.scheduler.waiting.order(50)
    return dict(zip(line, map(dict, waits(harness.scheduler, line)), strict=True))


def started(harness: Harness, *requests: Request) -> None:
    harness.add(*requests)
    harness.step()
    harness.step()


def test_all_slots_taken() -> None:
    harness = Harness(slots=1)
    waiting = make_request(40, 8)
    started(harness, make_request(8, 50), waiting)
    assert told(harness) == {waiting: {"why": "slots", "needed": 3}}


def test_slots_kept_for_chat_hold_up_scripts_only() -> None:
    harness = Harness(slots=3, reserved_interactive_slots=2)
    script = make_request(8, 50)
    started(harness, make_request(8, 50), script)
    assert told(harness)[script]["why"] == "reserved"
    chats = [make_request(8, 50, request_class=CHAT, owner=f"u{n}") for n in range(3)]
    started(harness, *chats)
    assert [told(harness)[each]["why"] for each in (script, chats[2])] == ["slots", "slots"]


def test_an_owner_over_its_own_limit_is_told_so_and_others_are_not() -> None:
    harness = Harness(slots=4, max_running_per_owner=1)
    second = make_request(8, 50)
    started(harness, make_request(8, 50), second, make_request(8, 50, owner="bob"))
    assert told(harness) == {second: {"why": "owner", "needed": 1}}
    harness.tune(max_running_per_owner=0, max_blocks_per_owner=1)
    assert told(harness)[second]["why"] == "owner"


def test_the_first_in_line_says_how_many_blocks_it_lacks_and_the_next_that_it_is_behind() -> None:
    harness = Harness(num_blocks=10, slots=4)
    started(harness, make_request(100, 8))
    large, small = make_request(60, 8, owner="bob"), make_request(8, 8, owner="carol")
    started(harness, large, small)
    found = told(harness)
    assert found[small] == {"why": "turn", "needed": 1}
    lack = found[large]
    assert lack["why"] == "memory"
    assert lack["needed"] == 4
    assert lack["needed"] + lack["kept"] > lack["available"]
    assert lack["available"] == harness.kv.pool.num_available
    # And it starts once that is no longer so.
    harness.run()
    assert {large, small} <= set(harness.started)


def test_one_short_of_memory_starts_when_fewer_are_left_to_keep_room_for() -> None:
    """As much is available as when it was put off, but one answer less is to grow."""
    harness = Harness(num_blocks=12, slots=4)
    growing, ending = make_request(44, 60), make_request(8, 7, owner="bob")
    started(harness, growing, ending)
    waiting = make_request(100, 4, owner="carol")
    started(harness, waiting)
    available = told(harness)[waiting]["available"]
    while ending not in harness.ended:
        harness.step()
    assert harness.kv.num_blocks_of(growing.request_id) == 4, "it was to grow meanwhile"
    assert harness.kv.pool.num_available == available
    harness.step()
    assert waiting in harness.started


def test_a_preempted_request_is_not_held_by_caps_that_hold_new_ones() -> None:
    harness = Harness(num_blocks=8, max_running_per_owner=2)
    harness.add(make_request(30, 60), make_request(30, 60))
    while not harness.num_preempted:
        harness.step()
    harness.step()
    [wait] = told(harness).values()
    assert wait["why"] == "memory"


def test_a_static_batch_is_waited_for() -> None:
    harness = Harness(policy="static")
    started(harness, make_request(8, 50))
    late = make_request(8, 8)
    started(harness, late)
    assert told(harness) == {late: {"why": "batch", "needed": 1}}


# ---- the context limit


def test_a_lowered_context_limit_holds_for_new_requests_and_not_for_accepted_ones() -> None:
    harness = Harness(max_len=1000)
    running, waiting = make_request(50, None), make_request(80, None)
    harness.tune(slots=1, max_model_len=200)
    started(harness, running, waiting)
    harness.tune(max_model_len=100)
    after = make_request(50, None)
    harness.add(after)
    harness.run()
    assert [r.num_tokens for r in (running, waiting, after)] == [200, 200, 100]
    assert {r.finish_detail for r in (running, waiting, after)} == {"context"}


def test_a_limit_lowered_between_check_and_queue_ends_the_request_and_not_the_engine() -> None:
    harness = Harness(max_len=1000)
    harness.tune(max_model_len=100)
    late = make_request(150, None)
    harness.add(late)
    harness.run()
    assert (late.finish_reason, len(late.output_token_ids)) == (FinishReason.LENGTH, 1)


def test_more_than_model_and_memory_allow_is_cut_with_the_reason() -> None:
    harness = Harness(max_len=1000, num_blocks=64)
    assert harness.scheduler.limits.context.effective == 1000
    harness.tune(max_model_len=5000)
    context = harness.scheduler.limits.context
    assert (context.requested, context.effective) == (5000, 1000)
    assert context.reason == "the model, the memory or a cap allows no more"


@pytest.mark.parametrize(
    ("max_len", "what"),
    [(1024, "server's memory"), (4096, "model's context"), (512, "server's context limit")],
)
def test_a_prompt_that_is_too_long_names_the_limit_that_it_meets(max_len: int, what: str) -> None:
    info = FakeRunner(num_blocks=64 if max_len == 1024 else 1000, max_model_len=4096).info
    with pytest.raises(PromptTooLong, match=what):
        check_request(make_request(max_len), info, max_len)
