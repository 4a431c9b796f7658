"""What top_k and top_p let through, against a sort of the whole vocabulary."""

import numpy as np
import pytest
import torch

from inference import nucleus
from inference.nucleus import least_weights

SHARES = (1e-6, 0.05, 0.3, 0.5, 0.9, 0.95, 0.999, 1.0)
LIMITS = (0, 1, 2, 63, 64, 65, 1000, 1024, 1025, 2500, 10**9)
VOCAB = 3000


def by_sorting(weights: torch.Tensor, top_k: int, top_p: float) -> float:
    """The definition: from the most likely down, while what came before is less than top_p."""
    ordered = weights.sort(descending=True).values
    limited = ordered[: top_k or len(ordered)].double()
    runs = torch.nn.functional.pad(weights, (0, -len(weights) % nucleus.RUN))
    whole = runs.view(-1, nucleus.RUN).sum(-1).double().sum()
    mass = whole if len(limited) == len(ordered) else limited.sum()
    before = (limited.cumsum(0) - limited) / mass
    count = len(limited) if top_p == 1.0 else max(int((before < top_p).sum()), 1)
    is_all = top_p == 1.0 and len(limited) == len(ordered)
    return 0.0 if is_all else float(limited[count - 1])


def distributions() -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(4)
    noise = torch.randn(VOCAB, generator=rng)
    logits = {
        "peaked": noise * 8,
        "usual": noise * 3,
        "flat": noise / 20,
        "nearly even": noise / 1e6,
        "even": torch.zeros(VOCAB),
        "in steps": (noise * 4).round(),
        "two levels": (noise > 1.5) * 2.0,
        "long tail": -torch.arange(VOCAB).float().log(),
        "many impossible": torch.where(noise > 0, noise, -torch.inf),
        "nearly all impossible": torch.where(noise > 2.5, noise, -torch.inf),
        "vanishing": noise * 40,
    }
    # From 0 on the logarithm is infinite; the first is the most likely.
    logits["long tail"][0] = 1.0
    return {name: (row - row.max()).exp() for name, row in logits.items()}


ROWS = distributions()


@pytest.mark.parametrize("name", ROWS)
def test_a_row_lets_through_what_a_whole_sort_does(name) -> None:
    pairs = [(top_k, top_p) for top_k in LIMITS for top_p in SHARES]
    got = least_weights(
        ROWS[name].expand(len(pairs), -1).contiguous(),
        np.array([top_k for top_k, _ in pairs], np.int64),
        np.array([top_p for _, top_p in pairs], np.float64),
    )
    want = [by_sorting(ROWS[name], min(top_k, VOCAB), top_p) for top_k, top_p in pairs]
    for pair, found, sought in zip(pairs, got.tolist(), want, strict=True):
        assert found == sought, pair


@pytest.mark.parametrize("size", [1, 2, 50, 127, 128, 129, 1500])
def test_a_vocabulary_of_any_size_is_covered(size) -> None:
    rng = torch.Generator().manual_seed(size)
    for spread in (0.01, 1.0, 6.0):
        row = torch.randn(size, generator=rng) * spread
        row = (row - row.max()).exp()
        for top_k in (0, 1, size // 2, size):
            for top_p in SHARES:
                got = least_weights(row[None], np.array([top_k]), np.array([top_p]))
                assert got.item() == by_sorting(row, top_k, top_p), (spread, top_k, top_p)


def test_a_row_is_the_same_alone_as_beside_others_of_every_kind() -> None:
    together = torch.stack(list(ROWS.values()))
    top_k = np.arange(len(ROWS), dtype=np.int64) % 3 * 1100
    top_p = np.resize(np.array(SHARES), len(ROWS))
    found = least_weights(together, top_k, top_p)
    for row in range(len(ROWS)):
        at = slice(row, row + 1)
        assert torch.equal(least_weights(together[at], top_k[at], top_p[at]), found[at])


def test_narrow_and_wide_looks_find_the_same(monkeypatch) -> None:
    weights = torch.stack(list(ROWS.values()))
    top_k, top_p = np.zeros(len(ROWS), np.int64), np.full(len(ROWS), 0.8)
    want = least_weights(weights, top_k, top_p)
    for widths in ((), (1,), (2, 5, 900), (64, 1024, 2999)):
        monkeypatch.setattr(nucleus, "WIDTHS", widths)
        assert torch.equal(least_weights(weights, top_k, top_p), want), widths


def test_a_row_that_is_no_number_harms_no_other_a14() -> None:
    weights = torch.stack([ROWS["flat"], torch.full((VOCAB,), torch.nan), ROWS["flat"]])
    got = least_weights(weights, np.zeros(3, np.int64), np.full(3, 0.7))
    want = by_sorting(ROWS["flat"], 0, 0.7)
    assert (got[0].item(), got[2].item()) == (want, want)
