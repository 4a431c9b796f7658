"""When the compiled forward pass serves, and what is told when it cannot."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference.config import EngineConfig, ModelConfig
from inference.runner.forward import ForwardUnavailable
from inference.runner.model_runner import ModelRunner
from inference.runner.native_forward import make_native_forward
from kernels.native import library
from tests.inference.native_steps import KERNELS, WIDE, native, storage_of
from tests.inference.tiny_models import save_tiny_model


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("mistral", "sliding window"),
        ("gemma2", "sliding window"),
        ("granite", "Llama's shape"),
        ("olmo2", "Llama's shape"),
        ("smollm3", "Llama's shape"),
        ("llama-tied-biased", "Llama's shape"),
        ("phi3-longrope-partial", "Llama's shape"),
    ],
)
def test_other_models_are_left_to_torch_with_a_reason(tmp_path, family, words) -> None:
    save_tiny_model(family, tmp_path)
    with pytest.raises(ForwardUnavailable, match=words):
        native(tmp_path, KERNELS[0])


def test_settings_that_rule_it_out_give_a_reason(tmp_path) -> None:
    save_tiny_model("llama", tmp_path, **WIDE)
    config = ModelConfig.from_dir(tmp_path)

    def make(settings: dict[str, Any], dtype: torch.dtype, **more: Any) -> None:
        make_native_forward(
            EngineConfig(model_dir=tmp_path, **settings),
            config,
            tmp_path,
            storage_of(tmp_path, dtype),
            lambda share, text: None,
            **more,
        )

    with pytest.raises(ForwardUnavailable, match="set to float32"):
        make({"dtype": "float32"}, torch.bfloat16)
    with pytest.raises(ForwardUnavailable, match="keys and values in bfloat16 or int8"):
        make({}, torch.float32)
    with pytest.raises(ForwardUnavailable, match="cannot run the sse9 kernels"):
        make({}, torch.bfloat16, kernels="sse9")


def test_without_a_compiler_torch_serves_and_the_notice_says_why(tmp_path, monkeypatch) -> None:
    save_tiny_model("llama", tmp_path, **WIDE)

    def fail() -> None:
        raise library.NativeUnavailable("there is no C++ compiler on this machine")

    monkeypatch.setattr(library, "load", fail)
    runner = ModelRunner(
        EngineConfig(model_dir=tmp_path, device="cpu", num_blocks=64, num_threads=1)
    )
    info = runner.load(lambda share, text: None)
    assert info.backend == "torch"
    assert "no C++ compiler" in info.notice
    runner.close()


def test_the_runner_takes_the_compiled_step(tmp_path) -> None:
    save_tiny_model("llama", tmp_path, **WIDE)
    runner = ModelRunner(
        EngineConfig(model_dir=tmp_path, device="cpu", num_blocks=64, num_threads=1)
    )
    info = runner.load(lambda share, text: None)
    assert info.backend == f"native {library.kernels_title(KERNELS[0])}"
    assert info.notice == ""
    assert info.dtype == "bfloat16"
    runner.close()


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_runner_keeps_keys_and_values_in_eight_bits_when_asked(tmp_path, backend) -> None:
    save_tiny_model("llama", tmp_path, **WIDE)
    shared = {"model_dir": tmp_path, "device": "cpu", "num_blocks": 64, "num_threads": 1}
    infos = []
    for kv_dtype in ("int8", "auto"):
        runner = ModelRunner(EngineConfig(**shared, kv_dtype=kv_dtype, cpu_backend=backend))
        infos.append(runner.load(lambda share, text: None))
        runner.close()
    eight, plain = infos
    assert (eight.kv_dtype, plain.kv_dtype) == ("int8", plain.dtype)
    # The calculation is the same one; a token's head takes 32 bytes and a scale.
    assert (eight.dtype, eight.backend) == (plain.dtype, plain.backend)
    width = 2 if backend == "native" else 4
    assert eight.bytes_per_block / plain.bytes_per_block == (32 + 4) / (32 * width)


def test_missing_tensors_are_named(tmp_path) -> None:
    save_tiny_model("llama", tmp_path, **WIDE)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.2.mlp.down_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Exception, match=r"layers\.2\.mlp\.down_proj\.weight"):
        native(tmp_path, KERNELS[0])
