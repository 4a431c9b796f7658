"""The prefix cache and forks end to end, over a runner that reads through block tables."""

import random

from inference.request import FinishReason
from tests.inference.helpers import Harness, expected_output, make_request


def test_a_second_request_computes_only_what_is_new():
    harness = Harness()
    prompt = list(range(100, 164))
    first, second = make_request(prompt, 2), make_request([*prompt, 5, 6], 2)
    harness.add(first)
    harness.run()
    harness.add(second)
    harness.run()
    assert second.num_cached_tokens == 64
    assert harness.runner.num_prompt_tokens[second.request_id] == 2


def test_a_request_shares_the_blocks_of_one_that_still_runs():
    harness = Harness()
    prompt = list(range(100, 164))
    harness.add(make_request(prompt, 20))
    harness.step()
    harness.add(make_request(prompt, 20))
    harness.step()
    assert harness.kv.pool.num_shared == 3


def test_another_user_sees_no_cached_tokens_of_a_private_prompt():
    """A06."""
    harness = Harness()
    prompt = list(range(100, 700))
    harness.add(make_request(prompt, 1, owner="alice"))
    harness.run()
    probe = make_request(prompt, 1, owner="bob")
    harness.add(probe)
    harness.run()
    assert probe.num_cached_tokens == 0
    assert harness.runner.num_prompt_tokens[probe.request_id] == 600


def churn(enable_prefix_cache, seed=3):
    """200 requests whose common beginning ends inside a block, in a pool that must evict."""
    harness = Harness(
        num_blocks=20, enable_prefix_cache=enable_prefix_cache, max_num_batched_tokens=40
    )
    rng = random.Random(seed)
    starts = [[rng.randrange(10, 900) for _ in range(n)] for n in (23, 37, 53)]
    requests = []
    for _ in range(200):
        tail = [rng.randrange(10, 900) for _ in range(rng.randrange(1, 30))]
        owner = rng.choice(["alice", "bob"])
        request = make_request(rng.choice(starts) + tail, rng.randrange(1, 25), owner=owner)
        requests.append(request)
        harness.add(request)
        harness.step()
    harness.run()
    return harness, requests


def test_answers_are_the_same_with_and_without_the_cache():
    """A08."""
    with_cache, first = churn(True)
    without, second = churn(False)
    assert [r.output_token_ids for r in first] == [r.output_token_ids for r in second]
    for request in first:
        n = request.params.max_tokens
        assert request.output_token_ids == expected_output(request.prompt_token_ids, n)
    assert with_cache.kv.pool.num_evicted > 0
    assert sum(request.num_cached_tokens for request in first) > 0
    assert without.kv.pool.num_cached == 0


def fork_all(prompt, count, **params):
    parent = make_request(prompt, **params)
    others = [
        make_request(parent.prompt_token_ids, fork_of=parent.request_id, **params)
        for _ in range(count - 1)
    ]
    return [parent, *others]


def test_forks_compute_their_prompt_once():
    harness = Harness(max_num_batched_tokens=64)
    requests = fork_all(200, 4, max_tokens=10)
    harness.add(*requests)
    harness.run()
    computed = [harness.runner.num_prompt_tokens[request.request_id] for request in requests]
    assert computed == [200, 1, 1, 1]
    for request in requests:
        assert request.output_token_ids == expected_output(request.prompt_token_ids, 10)


def test_forks_share_all_but_the_block_they_write():
    harness = Harness()
    harness.add(*fork_all(40, 3, max_tokens=5))
    harness.step()
    harness.step()
    # Two full prompt blocks for all, and one of its own each: five, not nine.
    assert harness.kv.pool.num_used == 5
    assert harness.kv.pool.num_shared == 2


def test_forks_that_find_no_slot_in_time_still_answer():
    harness = Harness(slots=1)
    requests = fork_all(40, 3, max_tokens=5)
    harness.add(*requests)
    harness.run()
    for request in requests:
        assert request.output_token_ids == expected_output(request.prompt_token_ids, 5)


def test_forks_survive_their_parents_abort():
    harness = Harness(max_num_batched_tokens=16)
    parent, child = fork_all(100, 2, max_tokens=5)
    harness.add(parent, child)
    harness.step()
    harness.scheduler.finish(parent.request_id, FinishReason.ABORT, None, harness.now_s)
    harness.run()
    assert child.output_token_ids == expected_output(child.prompt_token_ids, 5)


def test_a_fork_that_is_held_back_can_be_aborted():
    """A01."""
    harness = Harness(max_num_batched_tokens=16)
    parent, child = fork_all(100, 2, max_tokens=5)
    harness.add(parent, child)
    harness.step()
    assert harness.scheduler.num_waiting == 1
    assert harness.scheduler.finish(child.request_id, FinishReason.ABORT, None, 0.0) is child
    harness.run()
    assert parent.finish_reason is FinishReason.LENGTH
    assert harness.scheduler.num_waiting == 0


def test_naming_another_owners_request_as_parent_gives_nothing_of_it():
    """A06."""
    harness = Harness()
    prompt = list(range(100, 164))
    victim = make_request(prompt, 20, owner="alice")
    probe = make_request(prompt, 2, owner="bob", fork_of=victim.request_id)
    harness.add(victim)
    harness.step()
    harness.add(probe)
    harness.run()
    assert probe.num_cached_tokens == 0
    assert harness.runner.num_prompt_tokens[probe.request_id] == 64


def test_an_unknown_parent_is_ignored():
    harness = Harness()
    request = make_request(20, 2, fork_of="nobody")
    harness.add(request)
    harness.run()
    assert len(request.output_token_ids) == 2


# ---- hits of each beginning

# Three blocks.
SYSTEM = list(range(300, 348))


def hits(harness):
    return [(each.num_tokens, each.num_hits, each.scope) for each in harness.kv.hits.top(10)]


def test_hits_are_counted_for_each_beginning_of_prompts_and_whose_it_is():
    harness = Harness()
    for owner in ("alice", "bob", "carol"):
        harness.add(make_request([*SYSTEM, *range(400, 430)], 2, owner=owner, public=len(SYSTEM)))
        harness.run()
    assert hits(harness) == [(48, 2, "")], "the server's prompt, found by the second and the third"
    harness.add(make_request([*SYSTEM, *range(400, 470)], 2, owner="bob", public=len(SYSTEM)))
    harness.run()
    assert hits(harness) == [(48, 2, ""), (64, 1, "bob")]


def test_neither_choices_of_a_prompt_nor_a_preempted_request_count_as_hits():
    harness = Harness(num_blocks=8)
    harness.add(*fork_all(40, 3, max_tokens=60))
    harness.run()
    assert harness.num_preempted > 0
    assert hits(harness) == []


def test_switching_the_cache_off_forgets_the_hits_and_few_are_kept():
    harness = Harness(num_blocks=2000)
    for number in range(300):
        prompt = [number, *range(100, 130)]
        for _ in range(2):
            harness.add(make_request(prompt, 1))
            harness.run()
    assert len(harness.kv.hits.top(1000)) == 256
    harness.tune(enable_prefix_cache=False)
    assert hits(harness) == []
