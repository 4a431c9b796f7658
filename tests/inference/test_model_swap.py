"""The real model runner under the supervisor: one model gives way to another, and comes back."""

import gc
import weakref

import pytest

from inference.runner.model_runner import ModelRunner
from inference.sampling_params import SamplingParams
from inference.supervisor import EngineSupervisor, SwapOrder
from tests.appliance.serving.tiny_model import save_tiny_model
from tests.inference.engine_driving import until

PARAMS = SamplingParams(max_tokens=6, temperature=0.0)


@pytest.fixture
def folders(tmp_path):
    return {name: save_tiny_model(tmp_path / name) for name in ("first", "second")}


def test_models_change_give_their_memory_back_and_answer_as_before(folders):
    runners = []

    def make_runner(config):
        runner = ModelRunner(config)
        runners.append(weakref.ref(runner))
        return runner

    supervisor = EngineSupervisor(make_runner, {"device": "cpu", "kv_memory_bytes": 4_000_000})
    supervisor.start(lambda report: folders["first"])
    until(lambda: supervisor.phase.name in ("ready", "dead"))
    assert supervisor.phase.error is None
    before = supervisor.served.generator.generate("hello there", PARAMS).text
    storage = weakref.ref(supervisor.engine._runner._loaded.storage)
    broken = folders["second"] / "model.safetensors"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:-100])
    for stage in ("failed", "done"):
        supervisor.ask_swap(
            SwapOrder(model="second", resolve=lambda report: folders["second"], drain_s=5.0)
        )
        until(lambda: supervisor.swap.is_over)
        assert supervisor.swap.stage == stage, supervisor.swap.error
        assert supervisor.served.generator.generate("hello there", PARAMS).text == before
        broken.write_bytes(whole)
    assert supervisor.served.engine.info.model_name == "second"
    gc.collect()
    assert storage() is None, "the first model's keys and values are still held"
    supervisor.stop(0.0)
