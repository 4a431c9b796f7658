"""The KV pool becomes larger and smaller under running requests: none ends, none changes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.config import EngineConfig, InvalidConfig, ModelConfig
from inference.engine import Engine
from inference.kv_cache.storage import KVCacheStorage
from inference.request import FinishReason
from inference.runner.model_runner import ModelRunner
from inference.scheduling.settings import check_changes
from tests.appliance.serving.tiny_model import save_tiny_model
from tests.inference.helpers import FakeRunner, Harness, expected_output, fake_config, make_request

# Of twice the blocks that the pool begins with.
AS_LOADED = 0.5


def share(num_blocks, at_first=64):
    return num_blocks / (2 * at_first)


def all_right(harness, requests):
    harness.run()
    harness.scheduler.check_integrity()
    for request in requests:
        assert request.finish_reason is FinishReason.LENGTH, request.finish_detail
        expected = expected_output(request.prompt_token_ids, request.params.max_tokens)
        assert request.output_token_ids == expected


def test_a_pool_that_becomes_smaller_moves_what_is_held_and_ends_nobody():
    harness = Harness(num_blocks=64, block_size=16)
    requests = [make_request(100, 60) for _ in range(4)]
    harness.add(*requests)
    for _ in range(3):
        harness.step()
    held = {i for _, table in harness.kv.tables() for i in table}
    assert max(held) >= 20
    # The first two go, so that what is left must move down.
    for request in requests[2:]:
        harness.scheduler.finish(request.request_id, FinishReason.ABORT, None, harness.now_s)
    harness.tune(kv_memory_share=share(24))
    harness.step()
    assert {i for _, table in harness.kv.tables() for i in table} <= set(range(24))
    assert harness.kv.pool.num_blocks == 24
    assert len(harness.runner.memory) == 24, "the memory was given back"
    setting = harness.scheduler.resizer.setting()
    assert setting.effective == pytest.approx(share(24), abs=0.001)
    all_right(harness, requests[:2])


def test_what_finds_no_room_below_is_waited_for_and_meanwhile_nothing_starts_above():
    harness = Harness(num_blocks=64, block_size=16)
    requests = [make_request(200, 40) for _ in range(4)]
    harness.add(*requests)
    harness.step()
    harness.step()
    harness.tune(kv_memory_share=share(30))
    harness.scheduler.resizer.step(harness.scheduler.unfinished())
    harness.scheduler.check_integrity()
    setting = harness.scheduler.resizer.setting()
    assert setting.effective > setting.requested
    assert "still held" in setting.reason
    late = make_request(40, 10)
    harness.add(late)
    limit = harness.kv.pool.limit
    while harness.scheduler.resizer.is_due:
        harness.step()
    assert limit == 30
    assert harness.kv.pool.num_blocks == 30
    all_right(harness, [*requests, late])


def test_the_pool_is_not_made_smaller_than_an_accepted_request_may_become():
    harness = Harness(num_blocks=64, block_size=16)
    long = make_request(100, 700)
    harness.add(long)
    harness.step()
    harness.tune(kv_memory_share=share(16))
    assert harness.scheduler.limits.max_len == 256, "new requests are held to the new size at once"
    harness.step()
    assert harness.kv.pool.limit == 50
    assert "may need more" in harness.scheduler.resizer.setting().reason
    all_right(harness, [long])
    harness.step()
    assert harness.kv.pool.num_blocks == 16


def test_a_pool_that_becomes_larger_gives_the_new_blocks_out():
    harness = Harness(num_blocks=16, block_size=16, slots=8)
    harness.runner.most_blocks = 32
    requests = [make_request(150, 80) for _ in range(2)]
    harness.add(*requests)
    harness.step()
    assert len(harness.scheduler.running) == 1
    harness.tune(kv_memory_share=0.95)
    harness.step()
    assert harness.kv.pool.num_blocks == 30
    assert len(harness.scheduler.running) == 2
    assert harness.scheduler.limits.max_len == 30 * 16
    all_right(harness, requests)


def test_what_the_memory_does_not_hold_is_refused_with_the_reason():
    harness = Harness(num_blocks=64, block_size=16)
    harness.runner.most_blocks = 70
    harness.tune(kv_memory_share=0.9)
    harness.step()
    setting = harness.scheduler.resizer.setting()
    assert (setting.requested, setting.effective) == (0.9, AS_LOADED)
    assert "holds 70 blocks" in setting.reason
    request = make_request(100, 20)
    harness.add(request)
    all_right(harness, [request])
    harness.tune(kv_memory_share="auto")
    assert (
        harness.scheduler.resizer.setting().reason == "as the server chose when it loaded the model"
    )


def test_a_shared_block_moves_for_all_who_hold_it_and_is_found_at_its_new_place():
    harness = Harness(num_blocks=64, block_size=16)
    # Takes the low blocks first, so that the shared prompt lies above them.
    before = make_request(320, 100)
    harness.add(before)
    harness.step()
    prompt = list(range(20, 120))
    first = make_request(prompt, 40, owner="bob")
    harness.add(first)
    harness.step()
    second = make_request(prompt, 40, owner="bob")
    harness.add(second)
    harness.step()
    assert harness.kv.pool.num_shared
    harness.scheduler.finish(before.request_id, FinishReason.ABORT, None, harness.now_s)
    harness.tune(kv_memory_share=share(20))
    harness.step()
    assert harness.kv.pool.num_blocks == 20
    assert harness.kv.pool.num_shared
    third = make_request(prompt, 10, owner="bob")
    harness.add(third)
    all_right(harness, [first, second, third])
    assert third.num_cached_tokens >= 80


def test_a_prompt_that_was_checked_before_the_pool_shrank_ends_with_an_error_not_the_engine():
    harness = Harness(num_blocks=64, block_size=16)
    harness.tune(kv_memory_share=share(16))
    harness.step()
    late = make_request(500, 4)
    harness.add(late)
    harness.step()
    assert late.finish_reason is FinishReason.ERROR
    assert "smaller" in late.finish_detail
    small = make_request(50, 4)
    harness.add(small)
    all_right(harness, [small])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_happens_every_answer_is_right_and_every_block_accounted_for(data):
    harness = Harness(num_blocks=40, block_size=8, max_len=320)
    requests = []
    for _ in range(data.draw(st.integers(5, 25))):
        act = data.draw(st.sampled_from(["add", "same", "resize", "abort", "step", "step", "step"]))
        if act == "add":
            size, tokens = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 40))
            requests.append(make_request(size, tokens, owner=data.draw(st.sampled_from("ab"))))
            harness.add(requests[-1])
        elif act == "same":
            requests.append(make_request(list(range(20, 70)), 20, owner="a"))
            harness.add(requests[-1])
        elif act == "resize":
            harness.tune(kv_memory_share=data.draw(st.sampled_from([0.4, 0.45, 0.5, 0.7, 0.95])))
        elif act == "abort" and requests:
            victim = data.draw(st.sampled_from(requests))
            if harness.scheduler.get(victim.request_id):
                harness.scheduler.finish(victim.request_id, FinishReason.ABORT, None, harness.now_s)
        else:
            harness.step()
    kept = [request for request in requests if request.finish_reason is not FinishReason.ABORT]
    all_right(harness, kept)
    for _ in range(2):
        harness.step()
    assert not harness.scheduler.resizer.is_due
    pool = harness.kv.pool
    assert pool.num_used == 0
    assert pool.num_blocks == len(harness.runner.memory) == harness.scheduler.resizer.target


def test_the_engine_changes_it_live_and_shows_what_holds():
    runner = FakeRunner()
    engine = Engine(fake_config(), runner)
    engine.load()
    shown = engine.stats().settings["kv_memory_share"]
    assert (shown.requested, shown.effective) == ("auto", AS_LOADED)
    stream = engine.add_request(make_request(20, 50))
    engine.step()
    engine.tune(kv_memory_share=0.25)
    engine.step()
    assert engine.stats().settings["kv_memory_share"].effective == 0.25
    assert engine.stats().kv.blocks_total == 32
    while engine.step():
        pass
    assert stream.get(1.0).finish_reason is FinishReason.LENGTH
    engine.shutdown(0.0)


@pytest.mark.parametrize("value", [0, -0.1, 0.96, 1, "much", None, True, float("nan")])
def test_a_share_that_is_none_is_refused(value):
    with pytest.raises(InvalidConfig, match="kv_memory_share"):
        check_changes({"kv_memory_share": value})


def test_the_real_model_answers_the_same_while_its_pool_changes(tmp_path):
    folder = save_tiny_model(tmp_path / "tiny")

    def answers(changes):
        config = EngineConfig(model_dir=folder, device="cpu", num_blocks=40, max_num_seqs=4)
        engine = Engine(config, ModelRunner(config))
        engine.load()
        prompts = [[20 + (7 * i + j) % 200 for j in range(30 + 9 * i)] for i in range(4)]
        streams = [engine.add_request(make_request(p, 40, ignore_eos=True)) for p in prompts]
        shares, sizes, ids = iter(changes), [], []
        while engine.step():
            sizes.append(engine.stats().kv.blocks_total)
            share = next(shares, None)
            if share is not None:
                engine.tune(kv_memory_share=share)
        for stream in streams:
            update = stream.get(1.0)
            assert update.finish_reason is FinishReason.LENGTH
            ids.append(update.token_ids)
        engine.shutdown(0.0)
        return ids, sizes

    undisturbed, _ = answers([])
    changed, sizes = answers([None, None, 0.001, None, None, "auto", None, 0.001, None, "auto"])
    assert changed == undisturbed
    assert max(sizes) > 40
    assert sizes[-1] == 40


# ---- the real storage


def resident_bytes(cache):
    with open("/proc/self/smaps") as maps:
        address, found = cache.data_ptr(), False
        for line in maps:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                low, _, high = head.partition("-")
                found = int(low, 16) <= address < int(high, 16)
            elif found and line.startswith("Rss:"):
                return int(line.split()[1]) * 1024
    raise AssertionError("the cache is in no mapping")


@pytest.fixture(scope="module")
def model_config(tmp_path_factory):
    return ModelConfig.from_dir(save_tiny_model(tmp_path_factory.mktemp("tiny")))


def make_storage(model_config, num_blocks, capacity):
    return KVCacheStorage(
        model_config, num_blocks=num_blocks, block_size=16, dtype=torch.float32,
        device=torch.device("cpu"), capacity=capacity,
    )  # fmt: skip


def test_a_storage_that_shrinks_gives_its_memory_back_and_keeps_what_is_below(model_config):
    storage = make_storage(model_config, 2000, 4000)
    assert storage.key_cache.shape[1] == 4000
    storage.key_cache[:, :2000] = 1.0
    full = resident_bytes(storage.key_cache)
    storage.resize(500)
    assert resident_bytes(storage.key_cache) < 0.5 * full
    assert bool((storage.key_cache[:, :500] == 1.0).all())
    storage.resize(4000)
    assert bool((storage.key_cache[:, :500] == 1.0).all())
    with pytest.raises(Exception, match="at most 4,000 blocks"):
        storage.resize(4001)
    assert storage.num_blocks == 4000


def test_a_storage_of_another_device_is_made_anew_with_what_it_held(model_config):
    storage = make_storage(model_config, 20, 20)
    storage.key_cache[:] = torch.arange(20).view(1, 20, 1, 1, 1)
    storage._reallocate(30)
    assert storage.key_cache.shape[1] == storage.value_cache.shape[1] == 30
    assert storage.key_cache[0, 19, 0, 0, 0] == 19
    storage._reallocate(10)
    assert storage.key_cache[0, 9, 0, 0, 0] == 9


def test_scales_of_8_bits_move_with_their_numbers(model_config):
    storage = KVCacheStorage(
        model_config, num_blocks=20, block_size=16, dtype=torch.int8, device=torch.device("cpu")
    )
    assert storage.key_scales is not None
    assert storage.value_scales is not None
    storage.key_scales[:] = torch.arange(20.0).view(1, 20, 1, 1)
    storage._reallocate(30)
    assert storage.key_cache.dtype == torch.int8
    assert storage.key_scales.shape == storage.value_scales.shape == storage.key_cache.shape[:-1]
    assert storage.key_scales.dtype == torch.float32
    assert storage.key_scales[0, 19].eq(19).all()
