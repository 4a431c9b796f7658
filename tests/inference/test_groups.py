"""Quantised groups beside a decoder's weights, from a GGUF file to the logits of a decode."""

from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor
from triton.runtime.jit import JITFunction

from inference.config import ModelConfig
from inference.errors import ModelLoadError, NotEnoughMemory
from inference.fit import weight_bytes_of
from inference.kv_cache.storage import KVCacheStorage
from inference.layers.linear import Linear
from inference.models.decoder import Decoder
from inference.models.registry import decoder_spec
from inference.outputs import ScheduledRequest, SchedulerOutput
from inference.runner.cuda_graphs import DecodeBuffers
from inference.runner.input_batch import build_input_batch
from inference.runner.model_runner import load_decoder
from inference.weights.gguf_import import import_gguf
from inference.weights.groups import memory_of
from inference.weights.groups_file import GroupsFile
from inference.weights.header import GROUPS_FILE, GROUPS_FORMAT
from inference.weights.loader import Checkpoint
from kernels.quant_linear import MAX_ROWS
from kernels.quant_linear.packing import pack, unpack
from tests.gpu.check import triton_everywhere
from tests.inference.gguf_files import llama_weights, write_llama
from tests.inference.tiny_models import make_request
from tests.kernels.native_cases import random_groups, random_super_blocks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def imported(folder: Path, kind: Kind) -> Path:
    write_llama(folder / "m.gguf", llama_weights(), kind)
    import_gguf(folder / "m.gguf", folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Must not be changed."""
    return imported(tmp_path_factory.mktemp("q4_1"), Kind.Q4_1)


def load(
    folder: Path,
    *,
    with_groups: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device = CPU,
) -> Decoder:
    return load_decoder(
        decoder_spec(ModelConfig.from_dir(folder)),
        Checkpoint(folder),
        GroupsFile(folder) if with_groups else None,
        max_positions=64,
        dtype=dtype,
        device=device,
        on_progress=lambda share, text: None,
    )


@torch.inference_mode()
def logits(folder: Path, decoder: Decoder, num_tokens: int) -> Tensor:
    """Of a step with the first tokens of one text; a single one is a decode."""
    storage = KVCacheStorage(
        ModelConfig.from_dir(folder), num_blocks=8, block_size=16, dtype=decoder.dtype, device=CPU
    )
    part = ScheduledRequest(make_request([7, 9, 30, 11]), 0, num_tokens, [2], samples=True)
    batch = build_input_batch(SchedulerOutput(0, [part], num_tokens), 16, CPU)
    output: Tensor = decoder(batch, storage)
    return output


def linears_of(decoder: Decoder) -> list[Linear]:
    return [module for module in decoder.modules() if isinstance(module, Linear)]


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
def test_every_linear_has_the_files_own_numbers(kind, tmp_path) -> None:
    folder = imported(tmp_path, kind)
    decoder = load(folder)
    assert decoder.reads_groups
    assert len(linears_of(decoder)) == 2 * 4 + 1
    for linear in linears_of(decoder):
        (groups,) = linear.groups
        # The weight is the same rounded to bf16, stacked in the same order.
        assert torch.equal(unpack(groups).bfloat16(), linear.weight)


def test_a_decode_reads_groups_alone(model) -> None:
    exact = logits(model, load(model, with_groups=False, dtype=torch.float32), 1)
    decoder = load(model)
    for linear in linears_of(decoder):
        linear.weight = torch.nn.Parameter(torch.full_like(linear.weight, torch.nan), False)
    # Activations are rounded to 16 bits: a wrong weight gives about 1.
    assert (logits(model, decoder, 1) - exact).abs().mean() < 0.05 * exact.std()


def test_a_prompt_reads_groups_only_for_its_last_token(model) -> None:
    """However short it is, so that it rounds the same whether its beginning was cached or not."""
    decoder, plain = load(model), load(model, with_groups=False)
    for linear in linears_of(decoder):
        if linear is not decoder.lm_head:
            linear.groups[0].scales.fill_(torch.nan)
    assert logits(model, decoder, 4).isfinite().all()
    decoder.lm_head.groups = ()
    assert torch.equal(logits(model, decoder, 4), logits(model, plain, 4))


@pytest.mark.parametrize(("num_rows", "grouped"), [(4, 2 * 4 + 1), (MAX_ROWS + 1, 0)])
@torch.inference_mode()
def test_a_captured_decode_launches_a_kernel_for_each_linear(model, num_rows, grouped) -> None:
    """On the meta device any question to the device fails, as it would in a capture."""
    device = torch.device("meta")
    decoder = load(model, device=device)
    storage = KVCacheStorage(
        ModelConfig.from_dir(model), num_blocks=8, block_size=16, dtype=torch.int8, device=device
    )
    launched: Counter[str] = Counter()

    def launch(kernel: JITFunction, *args: object, **kwargs: object) -> None:
        launched[kernel.__name__] += 1

    with mock.patch.object(JITFunction, "run", launch), triton_everywhere():
        decoder(DecodeBuffers(num_rows, 4, device).view(num_rows), storage)
    assert launched["_quant_linear_kernel"] == grouped


def test_more_rows_than_the_kernel_takes_read_the_weights(model) -> None:
    head = load(model).lm_head
    inputs = torch.ones(MAX_ROWS + 1, 256, dtype=torch.bfloat16)
    head.groups[0].scales.fill_(torch.nan)
    assert head(inputs, few_rows=True).isfinite().all()
    assert head(inputs[1:], few_rows=True).isnan().all()


def rewrite(folder: Path, target: Path, change) -> Path:
    """A copy of a model folder with another side file."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / GROUPS_FILE)
    change(tensors)
    save_file(tensors, target / GROUPS_FILE, metadata={"format": GROUPS_FORMAT})
    return target


def test_parts_of_unlike_form_are_multiplied_one_by_one(model, tmp_path) -> None:
    """As in files of the kind Q4_K_M: v has more bits than q and k beside it."""
    rng = torch.Generator().manual_seed(8)
    value = random_super_blocks(rng, 128, 256, bits=6)
    stem = "model.layers.0.self_attn.v_proj"

    def change(tensors: dict[str, Tensor]) -> None:
        for part in ("quants", "scales", "mins"):
            del tensors[f"{stem}.{part}"]
        tensors[f"{stem}.q6_k"] = value.blocks

    decoder = load(rewrite(model, tmp_path / "copy", change))
    stacked = decoder.layers[0].attention.qkv_proj
    assert [(part.num_columns, part.bits) for part in stacked.groups] == [
        (256, 4),
        (128, 4),
        (128, 6),
    ]
    stacked.bias = torch.nn.Parameter(torch.randn(512, generator=rng).bfloat16(), False)
    inputs = torch.randn(2, 256, generator=rng).bfloat16()
    weight = torch.cat([stacked.weight[:384].double(), value.weight])
    want = inputs.double() @ weight.T + stacked.bias.double()
    got = stacked(inputs, few_rows=True)
    torch.testing.assert_close(got.double(), want, atol=0.05 * float(want.std()), rtol=2**-7)
    assert len(decoder.layers[1].attention.qkv_proj.groups) == 1


def test_a_matrix_without_groups_keeps_its_weights(model, tmp_path) -> None:
    stem = "model.layers.0.self_attn.v_proj"

    def change(tensors: dict[str, Tensor]) -> None:
        for part in ("quants", "scales", "mins"):
            del tensors[f"{stem}.{part}"]

    decoder = load(rewrite(model, tmp_path / "copy", change))
    assert decoder.layers[0].attention.qkv_proj.groups == ()
    assert decoder.layers[0].attention.o_proj.groups != ()


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update({"model.layers.0.mlp.down_proj.scales": torch.zeros(3, 3).half()}),
        lambda t: t.pop("model.layers.0.mlp.down_proj.scales"),
        lambda t: t.update(
            {
                f"model.layers.0.mlp.down_proj.{part}": t[
                    f"model.layers.0.mlp.up_proj.{part}"
                ].clone()
                for part in ("quants", "scales", "mins")
            }
        ),
    ],
    ids=["ill-shaped", "without scales", "of another matrix"],
)
def test_a_side_file_that_does_not_fit_is_refused_by_name(model, tmp_path, change) -> None:
    folder = rewrite(model, tmp_path / "copy", change)
    with pytest.raises(ModelLoadError, match=GROUPS_FILE):
        load(folder)


def test_a_broken_side_file_is_refused_and_a_foreign_one_ignored(model, tmp_path) -> None:
    folder = rewrite(model, tmp_path / "copy", lambda tensors: None)
    save_file(load_file(model / GROUPS_FILE), folder / GROUPS_FILE, metadata={"format": "another"})
    assert not load(folder).reads_groups
    (folder / GROUPS_FILE).write_bytes(b"\xff" * 40)
    with pytest.raises(ModelLoadError, match=GROUPS_FILE):
        load(folder)


def groups_bytes(decoder: Decoder) -> int:
    return sum(part.nbytes for each in linears_of(decoder) for part in each.groups)


def test_groups_count_when_weights_are_held_against_memory(model, monkeypatch) -> None:
    weights = Checkpoint(model).num_elements * 2
    beside = groups_bytes(load(model))
    assert memory_of(GroupsFile(model)) == beside
    monkeypatch.setattr(
        "inference.runner.model_runner.free_memory", lambda device: weights + beside - 1
    )
    assert not load(model, with_groups=False).reads_groups
    with pytest.raises(NotEnoughMemory, match="weights need"):
        load(model)


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_blocks_of_256_are_told_as_large_as_they_become(model, tmp_path, bits) -> None:
    """They take more memory than their file: scales in fp32, numbers of 5 and 6 bits a byte."""
    rng = torch.Generator().manual_seed(bits)

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [each for each in tensors if each.endswith(".scales")]:
            stem = name.removesuffix(".scales")
            rows, num_groups = tensors.pop(name).shape
            del tensors[f"{stem}.quants"], tensors[f"{stem}.mins"]
            blocks = random_super_blocks(rng, rows, 32 * num_groups, bits=bits)
            tensors[f"{stem}.q{bits}_k"] = blocks.blocks

    folder = rewrite(model, tmp_path / "copy", change)
    beside = groups_bytes(load(folder))
    assert beside > sum(each.nbytes for each in load_file(folder / GROUPS_FILE).values())
    assert weight_bytes_of(folder) == Checkpoint(folder).num_elements * 2 + beside
    assert memory_of(GroupsFile(folder)) == beside


@pytest.mark.parametrize("bits", [4, 8])
def test_an_odd_number_of_groups_is_told_with_the_one_behind_it(tmp_path, bits) -> None:
    groups = random_groups(torch.Generator().manual_seed(1), 16, 96, bits=bits, with_mins=bits == 4)
    stored = {"quants": groups.quants, "scales": groups.scales, "mins": groups.mins}
    tensors = {f"m.{name}": each for name, each in stored.items() if each is not None}
    save_file(tensors, tmp_path / GROUPS_FILE, metadata={"format": GROUPS_FORMAT})
    packed = pack(groups.quants, groups.scales, groups.mins)
    assert memory_of(GroupsFile(tmp_path)) == packed.nbytes


def test_a_side_file_whose_parts_do_not_fit_is_no_figure(tmp_path) -> None:
    save_file({"m.quants": torch.zeros(4, 16, dtype=torch.uint8)}, tmp_path / GROUPS_FILE)
    with pytest.raises(ModelLoadError, match="do not fit together"):
        weight_bytes_of(tmp_path)
