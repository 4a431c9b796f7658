"""What the compiled forward pass keeps of the real model's distribution."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inference.outputs import ScheduledRequest, SchedulerOutput
from inference.runner.forward import Forward
from inference.runner.input_batch import build_input_batch
from tests.inference.native_steps import CPU, KERNELS, NUM_BLOCKS, native
from tests.inference.tiny_models import make_request


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


TEXT = (
    "A lighthouse keeper counts the ships that pass each night. On clear evenings there are many, "
    "and she writes their lights into a book: green to starboard, red to port, white at the mast. "
    "When fog comes in from the west she counts horns instead, and the book has a column for those."
)


@pytest.fixture(scope="module")
def real_text(bundled_model_dir: Path) -> tuple[list[int], Tensor]:
    """TEXT's ids, and what transformers in fp32 says after each: log-probabilities, float64."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    ids = Tokenizer.from_file(str(bundled_model_dir / "tokenizer.json")).encode(TEXT).ids
    model = AutoModelForCausalLM.from_pretrained(bundled_model_dir, dtype=torch.float32)
    with torch.inference_mode():
        return ids, model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def mean_divergence(forward: Forward, ids: list[int], want: Tensor, chunk: int) -> float:
    """Mean KL from `want`, teacher forced: a logits row for every token of every chunk."""
    rows = []
    for start in range(0, len(ids), chunk):
        count = min(chunk, len(ids) - start)
        part = ScheduledRequest(make_request(ids), start, count, list(range(NUM_BLOCKS)), True)
        batch = build_input_batch(SchedulerOutput(1, [part], count), 16, CPU)
        rows.append(forward.forward(replace(batch, logits_indices=torch.arange(count))).clone())
    got = torch.cat(rows).double().log_softmax(-1)
    return float((want.exp() * (want - got)).sum(-1).mean())


@pytest.mark.model
@pytest.mark.parametrize("use_groups", [True, False])
@pytest.mark.parametrize(
    ("kernels", "chunk"),
    [(KERNELS[0], 1), *((kernels, chunk) for kernels in KERNELS for chunk in (16, 100))],
)
def test_the_real_model_keeps_its_distribution(
    bundled_model_dir, real_text, kernels, use_groups, chunk
) -> None:
    forward, _ = native(bundled_model_dir, kernels, 16, use_groups=use_groups)
    assert forward.quantised == use_groups
    # Transformers' own bf16 has 1.2e-3 on this model.
    assert mean_divergence(forward, *real_text, chunk) <= 1.2e-3


@pytest.mark.model
@pytest.mark.parametrize(
    ("kernels", "chunk"), [(KERNELS[0], 1), *((kernels, 100) for kernels in KERNELS)]
)
def test_the_real_model_with_keys_and_values_in_eight_bits(
    bundled_model_dir, real_text, kernels, chunk
) -> None:
    forward, _ = native(bundled_model_dir, kernels, 16, kv_dtype=torch.int8)
    # 1e-3 with fp32 activations; those in bf16 add their own 5e-4. See inference/README.md.
    assert mean_divergence(forward, *real_text, chunk) <= 2e-3
