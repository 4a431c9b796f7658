"""A14: what is accepted can be sampled; what is out of range is named before it is queued."""

import math

import pytest

from inference.errors import InvalidSamplingParams
from inference.sampling_params import SamplingParams

WRONG = {
    "max_tokens": [0, -1, True, 1.5],
    "temperature": [-1, 2.1, math.nan, math.inf, "1"],
    "top_p": [0, -1, 1.0001, math.nan],
    "top_k": [-1, 1.5, 2**40],
    "min_p": [-0.1, 1.5],
    "repetition_penalty": [0, -1, 1e-38, 1e-45, 1e-3, 2.5],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "seed": [2**63, 2**70, -(2**64), True],
    "min_tokens": [-1],
    "logprobs": [-1, 21, 10**9],
    "stop": [("",), ("x" * 600,), tuple("abcdefghijklmnopqrstuvwxyz")],
    "stop_token_ids": [(-1,), (2**31,)],
    "logit_bias": [{-1: 1.0}, {5: 1e9}, {5: math.nan}, dict.fromkeys(range(400), 1.0)],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_values_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidSamplingParams) as refused:
        SamplingParams(**{name: value}).validate(vocab_size=1000)
    assert refused.value.param == name


def test_the_ends_of_the_ranges_are_accepted() -> None:
    SamplingParams(
        temperature=2.0,
        top_p=1.0,
        min_p=1.0,
        repetition_penalty=0.01,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        seed=-(2**63),
        logprobs=20,
        logit_bias={999: -100.0},
        stop_token_ids=(999,),
    ).validate(vocab_size=1000)
