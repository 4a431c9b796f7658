"""The draw against its definition: which tokens may come, and how often.

Many draws are asked of the reference; the others must draw the same ids, one by one.
"""

import math

import pytest
import torch

from kernels.backends import Backend, available
from kernels.errors import KernelArgumentError
from kernels.sampling import penalise, sample


def arguments(logits: torch.Tensor, **changes: float | list[float]) -> dict[str, torch.Tensor]:
    rows = logits.shape[0]
    floats = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
    wholes = {"seeds": 1, "positions": 0, "top_k": 0}

    def tensor(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        value = changes.get(name, default)
        return torch.tensor(value if isinstance(value, list) else [value] * rows, dtype=dtype)

    made = {name: tensor(name, value, torch.float32) for name, value in floats.items()}
    made |= {name: tensor(name, value, torch.int64) for name, value in wholes.items()}
    return made | {"logits": logits}


def seeds(count: int) -> list[int]:
    return [(7919 * seed << 31) - seed for seed in range(count)]


def test_draws_as_often_as_likely() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count = 20_000
    logits = probabilities.log().expand(count, 4).contiguous()
    drawn = sample(**arguments(logits, seeds=seeds(count), positions=5))
    found = drawn.bincount(minlength=4).double() / count
    # Five standard deviations of the most uncertain share.
    assert (found - probabilities).abs().max() < 5 * math.sqrt(0.25 / count)


def allowed(logits: torch.Tensor, heat: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Token by token, from the most likely down: the definition."""
    weights = ((logits.double() - logits.double().max()) / heat).exp()
    order = weights.sort(descending=True, stable=True).indices.tolist()
    kept = order[: top_k or len(order)]
    whole = sum(weights[token].item() for token in kept)
    names, before = set(), 0.0
    for token in kept:
        if before < top_p * whole and weights[token] >= min_p:
            names.add(token)
        before += weights[token].item()
    return names


OPTIONS = {
    "hot": (1.7, 0, 1.0, 0.0),
    "top_k": (1.0, 5, 1.0, 0.0),
    "top_p": (1.0, 0, 0.6, 0.0),
    "min_p": (1.0, 0, 1.0, 0.2),
    "all": (0.8, 12, 0.7, 0.05),
    "tiny top_p": (1.0, 0, 1e-4, 0.0),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_draws_only_and_all_of_what_the_options_allow(options, rng) -> None:
    row = torch.randn(40, generator=rng)
    heat, top_k, top_p, min_p = options
    names = allowed(row, *options)
    logits = row.expand(4000, 40).contiguous()
    drawn = sample(
        **arguments(
            logits, seeds=seeds(4000), temperature=heat, top_k=top_k, top_p=top_p, min_p=min_p
        )
    )
    seen = set(drawn.tolist())
    assert seen <= names
    # Of a hundredth of the whole, missing it in so many draws has a chance of e^-40.
    weights = (row / heat).exp()
    assert {t for t in names if weights[t] > 0.01 * weights.sum()} <= seen


@pytest.mark.parametrize("backend", available())
@pytest.mark.parametrize("has_ties", [False, True])
def test_equals_the_reference_row_by_row_and_alone(backend, has_ties, rng) -> None:
    rows = 8
    logits = torch.randn(rows, 300, generator=rng) * 3
    if has_ties:
        logits = logits.round()
    given = arguments(
        logits,
        seeds=seeds(rows),
        positions=list(range(rows)),
        temperature=[0.0, 0.7, 1.0, 1.3] * 2,
        top_k=[0, 0, 20, 3] * 2,
        top_p=[1.0, 0.9, 0.8, 1.0] * 2,
        min_p=[0.0, 0.0, 0.0, 0.1] * 2,
    )
    before = logits.clone()
    together = sample(**given, backend=backend)
    assert torch.equal(together, sample(**given, backend=Backend.REFERENCE))
    assert torch.equal(logits, before)
    alone = sample(**{name: tensor[5:6] for name, tensor in given.items()}, backend=backend)
    assert alone.tolist() == together[5:6].tolist()


@pytest.mark.parametrize("backend", available())
def test_greedy_takes_the_first_of_equals_and_bad_rows_say_so(backend) -> None:
    logits = torch.zeros(4, 9)
    logits[0, 3] = logits[0, 6] = 2.0
    logits[1, 4] = float("nan")
    logits[2] = float("-inf")
    logits[3, 1] = float("inf")
    drawn = sample(**arguments(logits, temperature=[0.0, 1.0, 1.0, 0.0]), backend=backend)
    assert drawn.tolist() == [3, -1, -1, -1]


def test_ties_with_the_last_of_top_k_are_kept() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]]).repeat(200, 1)
    drawn = sample(**arguments(logits, seeds=seeds(200), top_k=2))
    assert set(drawn.tolist()) == {0, 1, 2, 3}


def penalties(rng) -> dict[str, torch.Tensor]:
    return {
        "logits": torch.randn(3, 10, generator=rng) * 4,
        "rows": torch.tensor([0, 0, 2, 2]),
        "token_ids": torch.tensor([1, 9, 0, 5]),
        "counts": torch.tensor([0, 3, 1, 0]),
        "repetition": torch.tensor([1.5, 1.5, 1.0, 0.5]),
        "presence": torch.tensor([0.5, 0.5, -1.0, 0.0]),
        "frequency": torch.tensor([0.25, 0.25, 0.0, 1.0]),
    }


@pytest.mark.parametrize("backend", available())
def test_penalties_change_the_named_scores_as_defined_and_no_other(backend, rng) -> None:
    given = penalties(rng)
    want = given["logits"].clone()
    for pair in range(4):
        row, token = int(given["rows"][pair]), int(given["token_ids"][pair])
        count, factor = int(given["counts"][pair]), float(given["repetition"][pair])
        score = float(want[row, token])
        score = score / factor if score > 0 else score * factor
        score -= float(given["presence"][pair]) * (count > 0)
        want[row, token] = score - float(given["frequency"][pair]) * count
    penalise(**given, backend=backend)
    torch.testing.assert_close(given["logits"], want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("op", "name", "spoil"),
    [
        (sample, "logits", lambda t: t.half()),
        (sample, "logits", lambda t: t.T.contiguous().T),
        (sample, "top_k", lambda t: t.int()),
        (sample, "top_p", lambda t: t[1:]),
        (sample, "seeds", lambda t: t.to("meta")),
        (penalise, "counts", lambda t: t[1:]),
        (penalise, "repetition", lambda t: t.double()),
    ],
)
def test_refuses_bad_arguments_by_name(op, name, spoil, rng) -> None:
    given = arguments(torch.zeros(3, 10)) if op is sample else penalties(rng)
    given[name] = spoil(given[name])
    with pytest.raises(KernelArgumentError) as refused:
        op(**given)
    assert refused.value.argument == name
