"""Reading model folders: what is loaded, and what is refused and why."""

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference.config import EngineConfig
from inference.errors import MissingWeights, ModelLoadError, UnsupportedArchitecture
from inference.models.registry import ARCHITECTURES
from inference.outputs import RunnerInfo
from inference.runner.model_runner import ModelRunner
from tests.inference.tiny_models import StepDriver, make_request, save_tiny_model

PROMPT = [5, 9, 40, 77, 12]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_model("llama", tmp_path / "model", num_hidden_layers=2)
    return tmp_path / "model"


def load(folder: Path, progress: Callable[[float, str], None] = lambda share, text: None):
    runner = ModelRunner(
        EngineConfig(model_dir=folder, device="cpu", dtype="float32", num_blocks=16, num_threads=1)
    )
    return runner, runner.load(progress)


def answer(folder: Path) -> list[int]:
    runner, info = load(folder)
    assert isinstance(info, RunnerInfo)
    request = make_request(PROMPT)
    StepDriver(runner.execute, num_blocks=16, block_size=16).run([request], 6)
    runner.close()
    return request.output_token_ids


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "drop"}))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for index in range(3):
        name = f"model-0000{index + 1}-of-00003.safetensors"
        part = dict(list(tensors.items())[index::3])
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# ---- what is loaded -------------------------------------------------------------------------


def test_shards_give_the_same_model_with_and_without_their_index(folder) -> None:
    whole = answer(folder)
    shard(folder)
    assert answer(folder) == whole
    (folder / "model.safetensors.index.json").unlink()
    assert answer(folder) == whole


def test_other_safetensors_beside_the_model_are_not_read(folder) -> None:
    whole = answer(folder)
    noise = {
        name: torch.zeros_like(tensor)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(noise, folder / "quantized.safetensors")
    assert answer(folder) == whole
    shard(folder)
    assert answer(folder) == whole


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_any_float_dtype_on_disk_is_converted(folder, dtype) -> None:
    rewrite(folder, lambda t: t.update({k: v.to(torch.bfloat16).to(dtype) for k, v in t.items()}))
    assert len(answer(folder)) == 6


def test_progress_rises_to_one(folder) -> None:
    seen: list[tuple[float, str]] = []
    runner, _ = load(folder, lambda share, text: seen.append((share, text)))
    runner.close()
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    assert len(shares) > 10
    assert all(text for _, text in seen)


# ---- what is refused ------------------------------------------------------------------------


def test_missing_tensors_are_named(folder) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        del tensors["model.norm.weight"]

    rewrite(folder, drop)
    with pytest.raises(MissingWeights) as refused:
        load(folder)
    assert "model.layers.1.self_attn.k_proj.weight" in str(refused.value)
    assert "model.norm.weight" in str(refused.value)


def test_ill_shaped_tensors_are_named_with_both_shapes(folder) -> None:
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.ones(47)}))
    with pytest.raises(MissingWeights, match=r"model\.norm\.weight \[47\] instead of \[48\]"):
        load(folder)


def test_many_missing_tensors_are_counted(folder) -> None:
    rewrite(folder, lambda t: [t.pop(name) for name in list(t) if ".mlp." in name])
    with pytest.raises(MissingWeights, match="and 1 more"):
        load(folder)


def test_whole_numbers_are_no_weights(folder) -> None:
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has dtype I8"):
        load(folder)


def test_a_shard_that_the_index_names_but_is_absent(folder) -> None:
    shard(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(MissingWeights, match="model-00002-of-00003"):
        load(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "shard.bin", 7])
def test_an_index_cannot_point_elsewhere_c18(folder, name) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ModelLoadError, match="beside it"):
        load(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_refused(folder, text) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelLoadError, match="index"):
        load(folder)


def test_an_unknown_architecture_lists_the_known_ones(folder) -> None:
    change_config(folder, architectures=["MambaForCausalLM"])
    with pytest.raises(UnsupportedArchitecture) as refused:
        load(folder)
    assert "MambaForCausalLM" in str(refused.value)
    assert all(name in str(refused.value) for name in ARCHITECTURES)


def test_no_weights_at_all(folder) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(MissingWeights, match=r"model\.safetensors is expected"):
        load(folder)


def test_a_missing_folder(tmp_path) -> None:
    with pytest.raises(ModelLoadError, match="not a folder"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"hidden_act": "relu"}, "relu"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 10000.0}}, "spiral"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0}}, "llama3"),
        ({"hidden_size": 10**12}, "hidden_size"),
        ({"num_hidden_layers": "many"}, "config.json"),
        ({"vocab_size": "drop"}, "vocab_size"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused_c18(folder, changes, said) -> None:
    change_config(folder, **changes)
    with pytest.raises(ModelLoadError, match=said):
        load(folder)


# ---- hostile folders: c18 -------------------------------------------------------------------


class _Opener:
    """Unpickling this writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def test_pickles_are_never_opened_c18(folder, tmp_path) -> None:
    marker = tmp_path / "marker"
    payload = pickle.dumps(_Opener(marker))
    (folder / "pytorch_model.bin").write_bytes(payload)
    assert len(answer(folder)) == 6  # safetensors beside it: fine
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"pickles \(pytorch_model\.bin\)"):
        load(folder)
    assert not marker.exists()
    pickle.loads(payload)
    assert marker.exists(), "the payload would have worked"


def test_code_that_the_configuration_names_never_runs_c18(folder, tmp_path) -> None:
    marker = tmp_path / "marker"
    (folder / "modeling_evil.py").write_text(f"import os; os.mkdir({str(marker)!r})")
    change_config(folder, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    assert len(answer(folder)) == 6
    assert not marker.exists()


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 100_000_000) + b"{",
        struct.pack("<Q", 8) + b"notjson!",
        struct.pack("<Q", 79)
        + b'{"model.norm.weight":{"dtype":"F32","shape":[48],"data_offsets":[0,9999999]}}  ',
        b"\x00",
        b"",
    ],
    ids=["absurd length", "longer than the file", "no json", "offsets past the end", "short", "no"],
)
def test_a_hostile_safetensors_header_is_refused_c18(folder, content) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match="not a readable safetensors file"):
        load(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_link_out_of_the_folder_is_refused_c18(folder, tmp_path, name) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    with pytest.raises(ModelLoadError, match="outside the model folder"):
        load(folder)


def test_a_link_inside_the_folder_is_fine(folder) -> None:
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    assert len(answer(folder)) == 6


def test_a_failed_load_leaves_a_runner_that_can_load_again(folder) -> None:
    good = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(b"")
    runner = ModelRunner(
        EngineConfig(model_dir=folder, device="cpu", dtype="float32", num_blocks=16, num_threads=1)
    )
    with pytest.raises(ModelLoadError):
        runner.load(lambda share, text: None)
    (folder / "model.safetensors").write_bytes(good)
    assert runner.load(lambda share, text: None).num_blocks == 16
    runner.close()
    runner.close()
