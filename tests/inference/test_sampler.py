import itertools
import math

import numpy as np
import pytest
import torch

from inference.outputs import TokenOutput
from inference.request import Request
from inference.sampler import Sampler, draw, uniform_numbers
from tests.inference.tiny_models import make_request

VOCAB = 300
EOS = (2, 7)


@pytest.fixture
def scores() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(8, VOCAB, generator=generator) * 2


def sample(logits: torch.Tensor, requests: list[Request], **kwargs) -> list[TokenOutput]:
    sampler = kwargs.pop("sampler", None) or Sampler(VOCAB, EOS)
    return sampler.sample(logits.clone(), requests)


def ids(outputs: list[TokenOutput]) -> list[int]:
    return [output.token_id for output in outputs]


def spread_of(logits: torch.Tensor, **params) -> dict[int, float]:
    """Share of each token over an even grid of random numbers: the distribution drawn from."""
    count = 4000
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    drawn = draw(
        logits.expand(count, -1).clone(),
        (np.arange(count) + 0.5) / count,
        temperature=np.full(count, settings["temperature"], np.float32),
        top_k=np.full(count, settings["top_k"], np.int64),
        top_p=np.full(count, settings["top_p"], np.float64),
        min_p=np.full(count, settings["min_p"], np.float64),
    )
    tokens, counts = drawn.unique(return_counts=True)
    return {int(token): int(n) / count for token, n in zip(tokens, counts, strict=True)}


# ---- greedy ---------------------------------------------------------------------------------


def test_greedy_takes_the_most_likely(scores) -> None:
    requests = [make_request([3], str(row)) for row in range(8)]
    assert ids(sample(scores, requests)) == scores.argmax(-1).tolist()


@pytest.mark.parametrize("params", [{"temperature": 1e-5}, {"temperature": 1.0, "top_k": 1}])
def test_a_tiny_temperature_or_a_top_k_of_one_is_greedy_a14(scores, params) -> None:
    requests = [make_request([3], str(row), **params) for row in range(8)]
    assert ids(sample(scores, requests)) == scores.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_past_the_vocabulary_are_never_chosen_a13(scores, temperature) -> None:
    scores[:, VOCAB - 20 :] = 50.0
    sampler = Sampler(VOCAB - 20, EOS)
    requests = [
        make_request([3], str(row), temperature=temperature, logprobs=20, logit_bias={295: 100.0})
        for row in range(8)
    ]
    for output in sample(scores, requests, sampler=sampler):
        assert output.token_id < VOCAB - 20
        assert all(token_id < VOCAB - 20 for token_id, _ in output.logprobs.top)


def test_foreign_ids_in_parameters_touch_nothing_a13(scores) -> None:
    plain = [make_request([3], str(row)) for row in range(8)]
    odd = make_request(
        [VOCAB + 5, 10**7],
        "odd",
        logit_bias={VOCAB: 5.0, 10**9: 5.0},
        stop_token_ids=(VOCAB + 1,),
        min_tokens=3,
        repetition_penalty=1.2,
    )
    scores[0, list(EOS)] = -50.0  # barred anyway
    assert ids(sample(scores, [odd, *plain[1:]])) == scores.argmax(-1).tolist()


# ---- drawing --------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_their_probability(scores, temperature) -> None:
    want = (scores[0].double() / temperature).softmax(-1)
    got = spread_of(scores[:1], temperature=temperature)
    for token in range(VOCAB):
        # An even grid of 4000 numbers meets each interval to within one number at either end.
        assert abs(got.get(token, 0.0) - float(want[token])) <= 1 / 4000 + 1e-6


@pytest.mark.parametrize("top_k", [2, 5, 40, 299, 300, 10**9])
def test_top_k_keeps_that_many(scores, top_k) -> None:
    kept = set(scores[0].topk(min(top_k, VOCAB)).indices.tolist())
    got = spread_of(scores[:1] / 3, top_k=top_k)
    assert set(got) <= kept
    if top_k <= 40:
        assert set(got) == kept
        share = (scores[0] / 3).topk(top_k).values.double().softmax(-1)
        assert got[int(scores[0].argmax())] == pytest.approx(float(share[0]), abs=1e-3)


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("top_k", [0, 30])
def test_top_p_keeps_the_smallest_set_of_that_mass(scores, top_p, top_k) -> None:
    probabilities = (scores[0].double()).softmax(-1)
    order = probabilities.argsort(descending=True)[: top_k or VOCAB]
    shares = probabilities[order] / probabilities[order].sum()
    count = int((shares.cumsum(0) < top_p).sum()) + 1
    kept = {int(token): float(p) for token, p in zip(order[:count], shares[:count], strict=True)}
    whole = sum(kept.values())
    got = spread_of(scores[:1], top_p=top_p, top_k=top_k)
    assert set(got) <= set(kept)
    for token, probability in kept.items():
        assert abs(got.get(token, 0.0) - probability / whole) <= 1 / 4000 + 1e-6


@pytest.mark.parametrize("min_p", [0.05, 0.5, 1.0])
def test_min_p_drops_what_is_unlikely_beside_the_best(scores, min_p) -> None:
    probabilities = scores[0].softmax(-1)
    kept = set((probabilities >= min_p * probabilities.max() * 0.9999).nonzero()[:, 0].tolist())
    got = spread_of(scores[:1], min_p=min_p)
    assert set(got) <= kept
    if min_p >= 0.5:
        assert set(got) == kept


def test_filtered_tokens_are_never_drawn_at_the_edges() -> None:
    logits = torch.full((2, 1000), -3.0)
    logits[:, [0, 500, 999]] = 5.0
    for number in (0.0, 1.0 - 2.0**-40):
        drawn = draw(
            logits.clone(),
            np.full(2, number),
            temperature=np.ones(2, np.float32),
            top_k=np.full(2, 3, np.int64),
            top_p=np.ones(2),
            min_p=np.zeros(2),
        )
        assert set(drawn.tolist()) == ({0} if number == 0.0 else {999})


def test_random_numbers_are_even_and_unlike() -> None:
    numbers = uniform_numbers(np.full(20_000, 42, np.uint64), np.arange(20_000, dtype=np.uint64))
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    # Standard deviation of a bin's count is 31; the numbers are the same at every run.
    assert abs(counts - 1000).max() < 150
    neighbours = uniform_numbers(np.arange(1000, dtype=np.uint64), np.zeros(1000, np.uint64))
    assert len(set(numbers.tolist())) == 20_000
    assert abs(np.corrcoef(neighbours[1:], neighbours[:-1])[0, 1]) < 0.1


# ---- seeds: a15 -----------------------------------------------------------------------------


def generate(
    table: torch.Tensor, requests: list[Request], num_tokens: int, sampler: Sampler | None = None
) -> None:
    """A model whose scores depend on the last token alone."""
    sampler = sampler or Sampler(VOCAB, EOS)
    for _ in range(num_tokens):
        last = [(request.output_token_ids or request.prompt_token_ids)[-1] for request in requests]
        for request, output in zip(requests, sampler.sample(table[last], requests), strict=True):
            request.output_token_ids.append(output.token_id)


@pytest.fixture
def table() -> torch.Tensor:
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(8))


def seeded(name: str = "seeded", seed: int = 42) -> Request:
    return make_request([5, 6], name, temperature=0.8, seed=seed, top_p=0.95)


def test_a_seeded_text_is_the_same_whatever_the_batch_a15(table) -> None:
    alone = seeded()
    generate(table, [alone], 40)
    for position in range(3):
        batch = [
            make_request([9], "unseeded", temperature=1.5),
            make_request([9, 9, 9], "greedy", frequency_penalty=1.0),
        ]
        batch.insert(position, seeded("other"))
        generate(table, batch, 40)
        assert batch[position].output_token_ids == alone.output_token_ids


def test_a_neighbour_that_joins_or_leaves_changes_nothing_a15(table) -> None:
    alone, joined = seeded(), seeded("joined")
    generate(table, [alone], 40)
    sampler = Sampler(VOCAB, EOS)
    neighbour = make_request([9], "neighbour", temperature=1.0)
    generate(table, [joined], 10, sampler)
    generate(table, [neighbour, joined], 20, sampler)
    sampler.forget(["neighbour"])
    generate(table, [joined], 10, sampler)
    assert joined.output_token_ids == alone.output_token_ids


def test_a_preempted_text_goes_on_as_it_would_have_a15(table) -> None:
    for seed in (42, None):
        request = make_request([5], "preempted", temperature=1.0, seed=seed)
        twin = make_request([5], "preempted", temperature=1.0, seed=seed)
        sampler = Sampler(VOCAB, EOS)
        generate(table, [request], 30, sampler)
        generate(table, [twin], 12, sampler)
        generate(table, [twin], 18, sampler)
        assert twin.output_token_ids == request.output_token_ids


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**63 - 1, -(2**63)])
def test_every_allowed_seed_works_and_differs_a15(table, seed) -> None:
    first, again, other = seeded("a", seed), seeded("b", seed), seeded("c", 42)
    for request in (first, again, other):
        generate(table, [request], 20)
    assert first.output_token_ids == again.output_token_ids
    assert first.output_token_ids != other.output_token_ids


def test_unseeded_requests_vary_a15(table) -> None:
    texts = set()
    for name in ("a", "b"):
        for _ in range(2):  # the same name in another server
            request = make_request([5], name, temperature=1.0)
            generate(table, [request], 20)
            texts.add(tuple(request.output_token_ids))
    assert len(texts) == 4


# ---- penalties: a16 -------------------------------------------------------------------------


def edited(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """The scores that a request's token is chosen from."""
    changed = logits.clone()
    Sampler(VOCAB, EOS).sample(changed, [request])
    return changed


def test_repetition_counts_an_id_once_presence_is_0_or_1_frequency_counts_a16() -> None:
    logits = torch.linspace(-3, 3, VOCAB)[None]
    high, low = 290, 10
    once = make_request([high, low], "once", repetition_penalty=1.3)
    often = make_request([high] * 3 + [low], "often", repetition_penalty=1.3)
    often.output_token_ids = [high, low, low]
    assert torch.equal(edited(logits, once), edited(logits, often))
    changed = edited(logits, once)
    assert changed[0, high] == pytest.approx(float(logits[0, high]) / 1.3)
    assert changed[0, low] == pytest.approx(float(logits[0, low]) * 1.3)
    assert (changed != logits).sum() == 2

    prompt_only = make_request([high], "prompt", presence_penalty=1.0, frequency_penalty=0.5)
    assert torch.equal(edited(logits, prompt_only), logits)

    said = make_request([high], "said", presence_penalty=1.0, frequency_penalty=0.5)
    said.output_token_ids = [low, low, low, high]
    changed = edited(logits, said)
    assert changed[0, low] == pytest.approx(float(logits[0, low]) - 1.0 - 0.5 * 3, abs=1e-6)
    assert changed[0, high] == pytest.approx(float(logits[0, high]) - 1.0 - 0.5, abs=1e-6)
    assert (changed != logits).sum() == 2


def test_plain_neighbours_are_untouched_in_every_order_a16(table) -> None:
    def trio() -> dict[str, Request]:
        return {
            "plain": make_request([5], "plain"),
            "frequency": make_request([8] * 50, "frequency", frequency_penalty=1.05),
            "repetition": make_request([9, 8], "repetition", repetition_penalty=1.3),
        }

    alone = trio()
    for request in alone.values():
        generate(table, [request], 25)
    assert len({tuple(each.output_token_ids) for each in alone.values()}) == 3
    for order in itertools.permutations(alone):
        batch = trio()
        generate(table, [batch[name] for name in order], 25)
        for name, request in batch.items():
            assert request.output_token_ids == alone[name].output_token_ids


def test_bias_is_added_and_can_force_or_ban(scores) -> None:
    best = int(scores[0].argmax())
    assert ids(sample(scores[:1], [make_request([3], "a", logit_bias={17: 100.0})])) == [17]
    banned = ids(sample(scores[:1], [make_request([3], "b", logit_bias={best: -100.0})]))
    assert banned == [int(scores[0].topk(2).indices[1])]


def test_min_tokens_bars_every_end_until_then_a20(scores) -> None:
    scores[0, [2, 7, 11]] = torch.tensor([30.0, 29.0, 28.0])
    request = make_request([3], "r", min_tokens=2, stop_token_ids=(11,))
    expected = int(scores[0].clone().index_fill_(0, torch.tensor([2, 7, 11]), -99.0).argmax())
    for wanted in (expected, expected, 2):
        (token,) = ids(sample(scores[:1], [request]))
        assert token == wanted
        request.output_token_ids.append(token)


# ---- faults: a14 ----------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("neighbour", [{}, {"temperature": 1.0, "seed": 1, "top_p": 0.9}])
def test_an_unusable_row_fails_alone_a14(scores, bad, neighbour) -> None:
    requests = [make_request([3], str(row), **neighbour) for row in range(8)]
    healthy = ids(sample(scores, requests))
    scores[3, 100] = bad
    scores[5] = -math.inf
    outputs = sample(scores, requests)
    for row, output in enumerate(outputs):
        if row in (3, 5):
            assert output.token_id == -1
            assert "no usable scores" in output.error
        else:
            assert output.error is None
            assert output.token_id == healthy[row]


def test_an_unusable_row_with_logprobs_has_none_a14(scores) -> None:
    scores[1, 0] = math.nan
    requests = [make_request([3], str(row), logprobs=2) for row in range(3)]
    outputs = sample(scores[:3], requests)
    assert outputs[1].error is not None
    assert outputs[1].logprobs is None
    assert outputs[0].logprobs is not None


# ---- log probabilities ----------------------------------------------------------------------


def test_logprobs_are_of_the_model_not_of_the_edited_scores(scores) -> None:
    best = int(scores[1].argmax())
    requests = [
        make_request([3], "plain"),
        make_request([3], "three", logprobs=3, temperature=0.5, seed=4, logit_bias={best: -100.0}),
        make_request([3], "chosen only", logprobs=0),
    ]
    plain, three, chosen_only = sample(scores[:3], requests)
    assert plain.logprobs is None
    exact = scores[1].double().log_softmax(-1)
    assert three.token_id != best
    assert three.logprobs.token_logprob == pytest.approx(float(exact[three.token_id]), abs=1e-5)
    assert [token_id for token_id, _ in three.logprobs.top] == exact.topk(3).indices.tolist()
    for token_id, value in three.logprobs.top:
        assert value == pytest.approx(float(exact[token_id]), abs=1e-5)
    assert chosen_only.logprobs.top == []
    assert chosen_only.logprobs.token_logprob == pytest.approx(
        float(scores[2].double().log_softmax(-1).max()), abs=1e-5
    )


def test_a_finished_request_leaves_nothing_behind(scores) -> None:
    sampler = Sampler(VOCAB, EOS)
    first = make_request([3], "same name", temperature=1.0, logit_bias={50: 100.0})
    assert ids(sample(scores[:1], [first], sampler=sampler)) == [50]
    sampler.forget(["same name", "never seen"])
    second = make_request([3], "same name")
    assert ids(sample(scores[:1], [second], sampler=sampler)) == [int(scores[0].argmax())]
