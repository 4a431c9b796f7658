"""Every GGUF family comes back as the checkpoint that it was made from.

The files are written as the format's converters write them. The oracle is the original folder: same
weights, and the same decoder as the engine reads it; and for quantised files transformers itself,
given the numbers that the format's own library reads out of them.
"""

import dataclasses
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from transformers import PreTrainedModel

from inference.config import ModelConfig
from inference.errors import ModelLoadError
from inference.models.registry import ARCHITECTURES, decoder_spec
from inference.models.spec import DecoderSpec
from inference.weights.gguf_families import FAMILIES
from inference.weights.gguf_import import import_gguf
from inference.weights.groups import read_packed
from inference.weights.groups_file import GroupsFile
from kernels.quant_linear.packing import unpack
from tests.inference import gguf_family_files
from tests.inference.gguf_family_files import (
    CASES,
    GGUF_VOCAB_SIZE,
    WITH_NORM_OFFSET,
    Arch,
    write_file,
)
from tests.inference.tiny_models import (
    CPU,
    greedy_of_transformers,
    make_request,
    random_prompts,
    save_tiny_model,
    started,
)


def comparable(spec: DecoderSpec) -> DecoderSpec:
    """Without those fields of a rotation that its kind does not use."""
    used = ("factor", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor")
    ropes = []
    for rope in spec.ropes:
        names = used if rope.kind != "default" else ()
        if rope.kind != "linear":
            names = (*names, "original_max_position_embeddings") if names else ()
        kept = {name: rope.parameters[name] for name in names if name in rope.parameters}
        ropes.append(dataclasses.replace(rope, parameters=kept))
    return dataclasses.replace(spec, ropes=tuple(ropes))


def test_every_served_architecture_but_one_is_imported() -> None:
    # Files of Mistral models call themselves llama.
    imported = {family.architecture for family in FAMILIES.values()}
    assert imported | {"MistralForCausalLM"} == set(ARCHITECTURES)
    assert {gguf.MODEL_ARCH_NAMES[arch] for _, arch, _ in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("case", CASES)
def test_a_family_comes_back_as_it_was(case: str, tmp_path: Path) -> None:
    family, arch, changes = CASES[case]
    original, imported = tmp_path / "original", tmp_path / "imported"
    save_tiny_model(family, original, vocab_size=GGUF_VOCAB_SIZE, **changes)
    write_file(tmp_path / "model.gguf", arch, original)
    import_gguf(tmp_path / "model.gguf", imported)

    before, after = (
        load_file(original / "model.safetensors"),
        load_file(imported / "model.safetensors"),
    )
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        # Adding and taking away a norm's 1 in float32 may move the last bit.
        torch.testing.assert_close(
            after[name].float(), tensor.bfloat16().float(), rtol=0.01, atol=1e-6
        )
        if arch not in WITH_NORM_OFFSET:
            assert torch.equal(after[name], tensor.bfloat16()), name
    specs = [
        comparable(decoder_spec(ModelConfig.from_dir(folder))) for folder in (original, imported)
    ]
    assert specs[1] == specs[0]


def test_the_largest_gemmas_scale_scores_by_a_heads_share(tmp_path: Path) -> None:
    original = tmp_path / "original"
    save_tiny_model(
        "gemma2",
        original,
        vocab_size=GGUF_VOCAB_SIZE,
        num_hidden_layers=46,
        num_attention_heads=3,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    write_file(tmp_path / "model.gguf", Arch.GEMMA2, original)
    import_gguf(tmp_path / "model.gguf", tmp_path / "imported")
    config = json.loads((tmp_path / "imported" / "config.json").read_text())
    assert config["query_pre_attn_scalar"] == 16


def test_an_unknown_table_of_frequencies_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, arch, changes = CASES["llama-llama3"]
    save_tiny_model(family, tmp_path / "original", vocab_size=GGUF_VOCAB_SIZE, **changes)
    monkeypatch.setattr(
        gguf_family_files,
        "llama3_divisors",
        lambda rope, dim: np.array([1, 2, 3, 4], np.float32),
    )
    write_file(tmp_path / "model.gguf", arch, tmp_path / "original")
    with pytest.raises(ModelLoadError, match="position frequencies"):
        import_gguf(tmp_path / "model.gguf", tmp_path / "imported")


# Whole groups of 32 in every matrix.
WIDE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
KINDS = {
    # Half of the bits that bf16 has for a number's size.
    Kind.F16: CASES,
    Kind.Q8_0: CASES,
    # With the rows of queries and keys in another order, whatever a row's form.
    Kind.Q4_0: ("llama", "smollm3", "granite"),
    Kind.Q4_1: ("llama", "smollm3", "granite"),
}


@torch.no_grad()
def read_back(model: PreTrainedModel, kind: Kind) -> None:
    """Give a model the numbers that its file in `kind` holds, as an import keeps them."""
    for parameter in model.parameters():
        values = parameter.numpy()
        if values.ndim == 2:
            values = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        parameter.copy_(torch.from_numpy(np.array(values, np.float32)).bfloat16().float())


@pytest.mark.parametrize(
    ("kind", "case"), [(kind, case) for kind, cases in KINDS.items() for case in cases]
)
def test_an_imported_family_says_what_transformers_says(kind, case, tmp_path) -> None:
    family, arch, changes = CASES[case]
    sizes = {"vocab_size": GGUF_VOCAB_SIZE, **WIDE}
    oracle = save_tiny_model(family, tmp_path / "original", **(sizes | changes))
    write_file(tmp_path / "model.gguf", arch, tmp_path / "original", kind)
    folder = tmp_path / "imported"
    import_gguf(tmp_path / "model.gguf", folder)
    read_back(oracle, kind)

    runner, driver = started(folder)
    requests = []
    # Past the windows, and past the 16 tokens after which transformers changes longrope's factors.
    for index, prompt in enumerate(random_prompts(33, 18, vocab_size=GGUF_VOCAB_SIZE)):
        requests.append(make_request(prompt, f"{index}"))
        driver.run([requests[-1]], 6)
    runner.close()
    for request in requests:
        want = greedy_of_transformers(oracle, request.prompt_token_ids, 6)
        assert request.output_token_ids == want
    if kind is not Kind.F16:
        assert_groups_are_the_weights(folder)


def assert_groups_are_the_weights(folder: Path) -> None:
    """The side file's matrices, which compiled steps read, in the same order of rows."""
    groups = GroupsFile(folder)
    weights = load_file(folder / "model.safetensors")
    matrices = {name: each for name, each in weights.items() if each.ndim == 2}
    for name, weight in matrices.items():
        (packed,) = read_packed(groups, [name], CPU)
        assert torch.equal(unpack(packed).bfloat16(), weight), name
