"""Whatever is added, aborted, tuned or preempted, the invariants hold after every step."""

from hypothesis import event, given, settings
from hypothesis import strategies as st

from inference.request import FinishReason, RequestClass
from tests.inference.helpers import Harness, expected_output, make_request

# Beginnings that requests share, ending inside a block and at its border.
STARTS = [list(range(100, 100 + n)) for n in (0, 7, 16, 40)]

adds = st.fixed_dictionaries(
    {
        "start": st.sampled_from(STARTS),
        "tail": st.integers(1, 60),
        "max_tokens": st.one_of(st.none(), st.integers(1, 60)),
        "owner": st.sampled_from(["alice", "bob", "carol"]),
        "request_class": st.sampled_from(list(RequestClass)),
        "public": st.sampled_from([0, 16]),
        "fork": st.booleans(),
        "patience_s": st.sampled_from([None, 3.0]),
    }
)
tunes = st.sampled_from(
    [
        {"slots": 1},
        {"slots": 6},
        {"slots": "auto"},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 64},
        {"reserved_interactive_slots": 2},
        {"policy": "static"},
        {"speculation": "on"},
        {"speculation": "off"},
        {"policy": "continuous"},
        {"enable_prefix_cache": False},
        {"enable_prefix_cache": True},
        {"max_running_per_owner": 1},
        {"max_blocks_per_owner": 4},
        {"admission_headroom": 0.3},
        {"reserve_tokens": 64},
        {"reserve_tokens": 0},
        {"owner_weights": {"alice": 3.0}},
        {"aging_s": 0.5},
    ]
)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), adds),
        st.tuples(st.just("add"), adds),
        st.tuples(st.just("step"), st.integers(1, 12)),
        st.tuples(st.just("abort"), st.integers(0, 100)),
        st.tuples(st.just("tune"), tunes),
    ),
    max_size=40,
)


def add(harness, requests, args):
    parent = requests[-1] if args["fork"] and requests else None
    patience_s = args["patience_s"]
    prompt = [*args["start"], *(200 + n for n in range(args["tail"]))]
    request = make_request(
        prompt if parent is None else parent.prompt_token_ids,
        args["max_tokens"],
        owner=args["owner"] if parent is None else parent.owner,
        request_class=args["request_class"],
        public=args["public"] if parent is None else parent.num_public_prefix_tokens,
        fork_of=None if parent is None else parent.request_id,
        queue_deadline_s=None if patience_s is None else harness.now_s + patience_s,
        ignore_eos=True,
    )
    requests.append(request)
    harness.add(request)


def step(harness):
    """One step; every request that lacked one token gets it, if the budget covers all."""
    scheduler = harness.scheduler
    decoding = {run.request: len(run.request.output_token_ids) for run in scheduler.running}
    decoding = {
        request: before
        for request, before in decoding.items()
        if request.num_tokens - request.num_computed_tokens == 1
    }
    fits = len(scheduler.running) <= scheduler.settings.max_num_batched_tokens
    preempted = {request: request.num_preemptions for request in decoding}
    harness.step()
    for request, before in decoding.items():
        if fits and request.num_preemptions == preempted[request]:
            assert len(request.output_token_ids) == before + 1


@settings(max_examples=80, deadline=None)
@given(operations)
def test_invariants_hold_and_every_request_ends_once_with_the_right_answer(ops):
    harness = Harness(num_blocks=12, slots=3, max_num_batched_tokens=24)
    requests = []
    for name, argument in ops:
        if name == "add":
            add(harness, requests, argument)
        elif name == "step":
            for _ in range(argument):
                step(harness)
        elif name == "abort" and requests:
            request = requests[argument % len(requests)]
            harness.scheduler.finish(request.request_id, FinishReason.ABORT, None, harness.now_s)
            harness.scheduler.check_integrity()
        elif name == "tune":
            harness.tune(**argument)
    harness.run(max_steps=20_000)

    assert len(harness.ended) == len(requests)
    assert set(harness.ended) == set(requests)
    assert harness.kv.pool.num_used == 0
    assert harness.kv.pool.num_available == 12
    assert harness.scheduler.num_waiting == 0
    for request in requests:
        n = len(request.output_token_ids)
        assert request.output_token_ids == expected_output(request.prompt_token_ids, n)
        if request.finish_reason is FinishReason.LENGTH:
            limit = request.max_len - request.num_prompt_tokens
            assert n == min(request.params.max_tokens or limit, limit)
        else:
            assert request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
    event(f"preempted: {harness.num_preempted > 0}")
