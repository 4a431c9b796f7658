"""The block pool alone: reference counts, the order of eviction, finding by content."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.kv_cache.block import BlockContent
from inference.kv_cache.block_pool import BlockPool, block_digest_function


def content(n, scope="s"):
    return BlockContent(scope, 0, (n,))


def cache(pool, block_id, n):
    pool.cache_full(block_id, b"%d" % n, content(n))


def test_blocks_go_out_and_come_back():
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert (pool.num_used, pool.num_free, pool.num_available) == (3, 1, 1)
    pool.release(blocks)
    assert (pool.num_used, pool.num_free) == (0, 4)
    pool.check_integrity([])


def test_a_released_full_block_is_kept_and_found():
    pool = BlockPool(4)
    [block_id] = pool.allocate(1)
    cache(pool, block_id, 1)
    pool.release([block_id])
    assert (pool.num_cached, pool.num_free) == (1, 3)
    assert pool.find(b"1", content(1)).block_id == block_id
    pool.touch([block_id])
    assert (pool.num_cached, pool.num_used) == (0, 1)
    pool.check_integrity([[block_id]])


def test_empty_blocks_go_first_then_the_least_recently_used():
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for n, block_id in enumerate(blocks[:2]):
        cache(pool, block_id, n)
    pool.release([blocks[0]])
    pool.release([blocks[1]])
    pool.release([blocks[2]])
    pool.touch([blocks[0]])
    pool.release([blocks[0]])
    assert pool.allocate(1) == [blocks[2]]
    assert pool.allocate(1) == [blocks[1]]
    assert pool.find(b"1", content(1)) is None
    assert pool.find(b"0", content(0)) is not None
    assert pool.num_evicted == 1


def test_the_end_of_a_table_is_evicted_before_its_start():
    pool = BlockPool(3)
    table = pool.allocate(3)
    for n, block_id in enumerate(table):
        cache(pool, block_id, n)
    pool.release(table)
    assert pool.allocate(2) == [table[2], table[1]]


def test_an_evicted_digest_is_not_found():
    """A08."""
    pool = BlockPool(1)
    [block_id] = pool.allocate(1)
    cache(pool, block_id, 1)
    pool.release([block_id])
    pool.allocate(1)
    assert pool.find(b"1", content(1)) is None
    pool.check_integrity([[block_id]])


def test_equal_digests_with_other_content_do_not_hit():
    """A05."""
    pool = BlockPool(2)
    [block_id] = pool.allocate(1)
    pool.cache_full(block_id, b"same", content(1))
    assert pool.find(b"same", content(2)) is None
    assert pool.find(b"same", content(1, scope="other")) is None
    assert pool.find(b"same", content(1)) is not None


def test_a_second_block_with_the_same_content_is_not_findable():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    cache(pool, first, 1)
    cache(pool, second, 1)
    pool.release([second])
    assert (pool.num_free, pool.num_cached) == (1, 0)
    pool.check_integrity([[first]])


def test_clearing_the_cache_leaves_used_blocks_with_their_holders():
    pool = BlockPool(3)
    held, kept = pool.allocate(2)
    cache(pool, held, 1)
    cache(pool, kept, 2)
    pool.release([kept])
    pool.clear_cache()
    assert (pool.num_used, pool.num_cached, pool.num_free) == (1, 0, 2)
    assert pool.find(b"1", content(1)) is None
    pool.check_integrity([[held]])


def test_shared_blocks_are_counted():
    pool = BlockPool(3)
    table = pool.allocate(2)
    pool.touch(table[:1])
    assert pool.num_shared == 1
    pool.release(table)
    assert (pool.num_shared, pool.num_used) == (0, 1)


@pytest.mark.parametrize("fault", ["count", "lost", "map"])
def test_the_integrity_check_notices_a_fault(fault):
    pool = BlockPool(3)
    table = pool.allocate(2)
    if fault == "count":
        pool.blocks[table[0]].ref_cnt += 1
    elif fault == "lost":
        pool.blocks[table[0]].ref_cnt = 0
        table = table[1:]
    else:
        pool.blocks[table[0]].digest = b"x"
    with pytest.raises(AssertionError):
        pool.check_integrity([table])


def test_fields_of_a_digest_cannot_run_into_one_another():
    """A05: ('org_1', '2345') and ('org_12345', '')."""
    digest = block_digest_function("model")
    assert digest("org_1", b"2345", [1]) != digest("org_12345", b"", [1])
    assert digest("a", b"", [1, 2]) != digest("a", b"", [12])
    assert digest("a", b"", [1]) != digest("a", digest("a", b"", [1]), [1])


def test_another_scope_or_model_has_other_digests():
    """A05."""
    digest = block_digest_function("model")
    assert digest("a", b"", [1]) != digest("b", b"", [1])
    assert digest("a", b"", [1]) != block_digest_function("model-2")("a", b"", [1])
    assert digest("a", b"", [1]) == block_digest_function("model")("a", b"", [1])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("asrc"), st.integers(0, 50)), max_size=60))
def test_the_pool_stays_whole_whatever_is_done_to_it(operations):
    """A08: allocate, share, release and cache at random."""
    pool = BlockPool(8)
    tables = []
    for operation, number in operations:
        if operation == "a" and pool.num_available:
            tables.append(pool.allocate(1 + number % pool.num_available))
        elif operation == "s" and tables:
            shared = list(tables[number % len(tables)])
            pool.touch(shared)
            tables.append(shared)
        elif operation == "r" and tables:
            pool.release(tables.pop(number % len(tables)))
        elif operation == "c" and tables:
            for block_id in tables[number % len(tables)]:
                cache(pool, block_id, number)
                number += 1
        pool.check_integrity(tables)
    for table in tables:
        pool.release(table)
    assert pool.num_available == 8
