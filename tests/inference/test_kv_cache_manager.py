"""Block tables: growth, prefixes, forks, and the founding figures of memory use."""

import pytest

from inference.kv_cache.manager import KVCacheManager
from tests.inference.helpers import make_request


def make_kv(num_blocks=256, **changes):
    return KVCacheManager(num_blocks, 16, model_version="m", **changes)


def compute(kv, request, num_tokens=None):
    """Start a request and compute its known tokens, as steps would."""
    kv.start(request, kv.find_prefix(request))
    num_tokens = request.num_tokens if num_tokens is None else num_tokens
    assert kv.allocate_slots(request, num_tokens)
    request.num_computed_tokens = num_tokens
    kv.commit(request)


def test_three_founding_requests_take_114_blocks_that_are_99_7_percent_full():
    kv = make_kv()
    requests = [make_request(n) for n in (412, 96, 1310)]
    for request in requests:
        compute(kv, request)
    assert kv.pool.num_used == 114
    assert round(100 * (412 + 96 + 1310) / (114 * 16), 1) == 99.7


def test_contiguous_reservations_use_29_6_percent_of_their_memory():
    kv = make_kv(num_blocks=400)
    kv.reserve_tokens = 2048
    for n in (412, 96, 1310):
        compute(kv, make_request(n))
    assert kv.pool.num_used == 3 * 128
    assert round(100 * (412 + 96 + 1310) / (kv.pool.num_used * 16), 1) == 29.6


def test_40_tokens_take_three_blocks_the_last_half_full():
    kv = make_kv()
    request = make_request(40)
    compute(kv, request)
    assert kv.num_blocks_of(request.request_id) == 3
    assert 3 * 16 - 40 == 8


def test_a_shared_system_prompt_of_48_tokens_takes_6_blocks_not_9():
    kv = make_kv()
    system = list(range(100, 148))
    first = make_request([*system, *range(200, 216)])
    second = make_request([*system, *range(300, 332)])
    compute(kv, first)
    compute(kv, second)
    assert kv.num_blocks_of(first.request_id) + kv.num_blocks_of(second.request_id) == 9
    assert kv.pool.num_used == 6
    assert kv.pool.num_shared == 3
    kv.check_integrity([first, second])


def test_a_table_grows_by_a_block_only_when_the_last_is_full():
    kv = make_kv()
    request = make_request(15)
    compute(kv, request)
    assert kv.allocate_slots(request, 16)
    assert kv.num_blocks_of(request.request_id) == 1
    assert kv.allocate_slots(request, 17)
    assert kv.num_blocks_of(request.request_id) == 2


def test_growth_that_does_not_fit_changes_nothing():
    kv = make_kv(num_blocks=2)
    request = make_request(16)
    compute(kv, request)
    assert not kv.allocate_slots(request, 64)
    assert kv.num_blocks_of(request.request_id) == 1
    assert kv.pool.num_free == 1


def test_the_last_token_of_a_wholly_cached_prompt_is_still_computed():
    kv = make_kv()
    prompt = list(range(100, 164))
    compute(kv, make_request(prompt))
    again = make_request(prompt)
    assert len(kv.find_prefix(again)) == 3
    longer = make_request([*prompt, 5])
    assert len(kv.find_prefix(longer)) == 4


def test_another_owner_does_not_find_a_private_prefix():
    """A06: the scope decides, and comes from the server."""
    kv = make_kv()
    prompt = list(range(100, 700))
    compute(kv, make_request(prompt, owner="alice"))
    assert kv.find_prefix(make_request(prompt, owner="bob")) == []
    assert len(kv.find_prefix(make_request(prompt, owner="alice"))) == 37


def test_the_servers_own_text_is_shared_and_what_follows_is_not():
    """A06."""
    kv = make_kv()
    prompt = list(range(100, 180))
    compute(kv, make_request(prompt, owner="alice", public=40))
    assert len(kv.find_prefix(make_request(prompt, owner="bob", public=40))) == 2
    assert len(kv.find_prefix(make_request(prompt, owner="alice", public=40))) == 4
    # The same ids as somebody's own text are another thing.
    assert kv.find_prefix(make_request(prompt, owner="bob")) == []


@pytest.mark.parametrize("scope", ["public", "", "private:alice", "alice\0"])
def test_no_scope_reaches_the_public_blocks_or_those_of_another(scope):
    """A05, A06."""
    kv = make_kv()
    prompt = list(range(100, 180))
    compute(kv, make_request(prompt, owner="alice", public=40))
    compute(kv, make_request([*range(300, 380)], owner="alice"))
    assert kv.find_prefix(make_request(prompt, cache_scope=scope)) == []
    assert kv.find_prefix(make_request([*range(300, 380)], cache_scope=scope)) == []


def test_a_digest_that_is_always_the_same_gives_no_false_hit():
    """A05: then only content decides."""
    kv = make_kv(digest=lambda scope, parent, token_ids: b"constant")
    compute(kv, make_request(list(range(100, 164))))
    assert kv.find_prefix(make_request(list(range(200, 264)))) == []
    # The same block twice in a row is another context.
    assert len(kv.find_prefix(make_request([*range(100, 116), *range(100, 148)]))) == 1
    assert kv.find_prefix(make_request(list(range(100, 164)), owner="bob")) == []


def test_another_models_blocks_are_never_found():
    """A05: the version is in the key, and a reload starts with an empty pool."""
    prompt = list(range(100, 164))
    old, new = make_kv(), KVCacheManager(256, 16, model_version="other")
    compute(old, make_request(prompt))
    assert new.find_prefix(make_request(prompt)) == []


def test_an_answer_becomes_a_prefix_of_the_next_turn():
    kv = make_kv()
    request = make_request(20)
    request.output_token_ids = list(range(500, 530))
    compute(kv, request, 49)
    kv.forget(request.request_id)
    turn = make_request([*request.prompt_token_ids, *request.output_token_ids, 7, 8])
    assert len(kv.find_prefix(turn)) == 3


def test_a_switched_off_cache_finds_and_keeps_nothing():
    kv = make_kv()
    prompt = list(range(100, 164))
    compute(kv, make_request(prompt))
    kv.set_prefix_cache(False)
    assert kv.find_prefix(make_request(prompt)) == []
    request = make_request(prompt)
    compute(kv, request)
    kv.forget(request.request_id)
    assert kv.pool.num_cached == 0
    kv.set_prefix_cache(True)
    assert kv.find_prefix(make_request(prompt)) == []


def test_a_fork_shares_full_blocks_and_copies_the_last_one():
    kv = make_kv()
    parent = make_request(40)
    compute(kv, parent)
    child = make_request(parent.prompt_token_ids)
    source, destination = kv.fork(parent, child)
    parent_table, child_table = kv.table(parent.request_id), kv.table(child.request_id)
    assert child_table[:2] == parent_table[:2]
    assert (source, destination) == (parent_table[2], child_table[2])
    assert child.num_computed_tokens == 39
    assert kv.pool.num_used == 4
    kv.check_integrity([parent, child])


def test_a_fork_of_a_prompt_that_fills_its_blocks_copies_the_block_it_writes():
    kv = make_kv()
    parent = make_request(32)
    compute(kv, parent)
    child = make_request(parent.prompt_token_ids)
    source, destination = kv.fork(parent, child)
    assert source == kv.table(parent.request_id)[1]
    assert destination != source
    kv.check_integrity([parent, child])


def test_forgetting_is_idempotent_and_returns_every_block():
    kv = make_kv()
    request = make_request(40)
    compute(kv, request)
    kv.forget(request.request_id)
    kv.forget(request.request_id)
    kv.forget("never existed")
    assert kv.pool.num_available == 256
    kv.check_integrity([])
