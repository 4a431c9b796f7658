"""Answers held to a schema, a regular expression or a grammar (A23)."""

import json
import re
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from inference.errors import InvalidConstraint
from inference.grammar.constraint import Constraint
from inference.request import FinishReason
from inference.sampling_params import SamplingParams
from tests.inference.structured import (
    COMPILER,
    EOS,
    PERSON,
    VOCAB_SIZE,
    fits,
    make_request,
    random_scores,
    run_all,
    schema,
    text_of,
    token_of,
)

# ---- what is made -------------------------------------------------------------------------------

leaves = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "integer", "minimum": -3, "maximum": 40},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string"},
        {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "^[a-f]{2,4}$"},
        {"enum": ["red", "green", 3, None]},
        {"const": {"fixed": [1]}},
    ]
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b", "long name", "ü"])
    objects = st.dictionaries(names, inner, max_size=3).flatmap(
        lambda properties: st.sets(st.sampled_from(sorted(properties) or ["a"])).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required & properties.keys()),
                "additionalProperties": False,
            }
        )
    )
    lists = st.builds(
        lambda items, most: {"type": "array", "items": items, "minItems": 1, "maxItems": most},
        inner,
        st.integers(1, 3),
    )
    return objects | lists | st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner)


schemas = st.recursive(leaves, containers, max_leaves=5)


@settings(max_examples=60, deadline=None)
@given(schemas, st.integers(0, 2**32), st.sampled_from([0.0, 0.7, 2.0]))
def test_what_ends_by_itself_is_json_of_the_schema_a23(form, seed, temperature) -> None:
    request = make_request(
        "r",
        [40 + seed % 50, seed % 90],
        seed=seed,
        temperature=temperature,
        constraint=schema(form),
    )
    run_all([request], check=False)
    event(str(request.finish_reason))
    assert request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    if request.finish_reason is FinishReason.STOP:
        value = json.loads(text_of(request))
        assert fits(value, form), (value, form)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        (Constraint("regex", "(yes|no), [0-9]{3}"), r"(yes|no), \d{3}"),
        (Constraint("lark", 'start: "<" WORD ">"\nWORD: /[a-c]{1,4}/'), r"<[a-c]{1,4}>"),
    ],
)
def test_regular_expressions_and_grammars_are_followed(constraint, pattern) -> None:
    requests = [make_request(f"r{n}", seed=n, constraint=constraint) for n in range(6)]
    run_all(requests)
    for request in requests:
        assert re.fullmatch(pattern, text_of(request)), text_of(request)
        assert (request.finish_reason, request.finish_detail) == (FinishReason.STOP, None)


def test_an_answer_ends_with_its_grammar_whatever_else_was_asked() -> None:
    """No further step for an end token; ignore_eos and min_tokens cannot make it go on."""
    constraint = Constraint("regex", "abc")
    plain = make_request("plain", constraint=constraint)
    odd = make_request("odd", constraint=constraint, ignore_eos=True, min_tokens=50)
    run_all([plain, odd])
    for request in (plain, odd):
        assert text_of(request) == "abc"
        assert EOS not in request.output_token_ids
        assert request.finish_reason is FinishReason.STOP


def test_ignore_eos_does_not_outlive_the_end_that_a_grammar_allows() -> None:
    request = make_request("r", constraint=Constraint("regex", "[0-9]+"), ignore_eos=True)

    def scores(context):
        return torch.nn.functional.one_hot(
            torch.tensor(EOS if len(context) > 5 else token_of("7")), VOCAB_SIZE
        ).float()

    request.params = SamplingParams(temperature=0.0, constraint=request.params.constraint)
    run_all([request], scores=scores)
    assert request.output_token_ids == [token_of("7")] * 3 + [EOS]
    assert request.finish_reason is FinishReason.STOP


def test_what_is_cut_says_length_a23() -> None:
    request = make_request("r", max_tokens=5, constraint=schema(PERSON))
    run_all([request])
    assert request.finish_reason is FinishReason.LENGTH
    assert len(request.output_token_ids) == 5


def test_white_space_cannot_fill_an_answer_a23() -> None:
    def scores(context):
        blank = torch.zeros(VOCAB_SIZE)
        blank[[token_of(" "), token_of("\n"), token_of("\t")]] = 9.0
        return blank + 0.01 * random_scores(context)

    numbers = {name: {"type": "integer"} for name in ("first", "second")}
    form = {"type": "object", "properties": numbers, "required": list(numbers)}
    request = make_request("r", temperature=0.0, max_tokens=300, constraint=schema(form))
    run_all([request], scores=scores)
    runs = re.findall(r"\s+", text_of(request))
    assert runs
    assert max(map(len, runs)) <= 22


def test_an_answer_is_put_together_from_text_and_schemas() -> None:
    call = [
        '{"name": "',
        {"one_of": [["a", '", "x": ', {"schema": {"type": "integer"}}], "b"]},
        "}",
    ]
    pieces = [call, {"up_to": 2, "of": [";\n", call]}]
    requests = [
        make_request(f"r{n}", seed=n, constraint=Constraint.of_json("pieces", pieces))
        for n in range(6)
    ]
    run_all(requests)
    one = r'\{"name": "(a", "x": -?\d+|b)\}'
    for request in requests:
        assert re.fullmatch(rf"{one}(;\n{one}){{0,2}}", text_of(request)), text_of(request)


@pytest.mark.parametrize("pieces", [[], [3], {"one_of": []}, {"schema": "x"}, [{"up_to": 2}]])
def test_what_is_no_piece_is_refused(pieces: Any) -> None:
    with pytest.raises(InvalidConstraint, match="response_format"):
        COMPILER.compile_now(Constraint.of_json("pieces", pieces))


# ---- beside others ------------------------------------------------------------------------------


def test_neighbours_are_sampled_as_if_alone() -> None:
    def free():
        return [make_request(f"free{n}", [50 + n], seed=n, max_tokens=30) for n in range(3)]

    def held():
        return [
            make_request(f"held{n}", [60 + n], seed=n, constraint=schema(PERSON)) for n in range(3)
        ]

    alone = [*free(), *held()]
    for request in alone:
        run_all([request])
    together = [*free(), *held()]
    run_all(together)
    outputs = [request.output_token_ids for request in together]
    assert outputs == [request.output_token_ids for request in alone]


def test_a_preempted_answer_goes_on_in_its_grammar() -> None:
    form = {"type": "array", "items": {"type": "integer"}, "minItems": 20}

    def held():
        return [
            make_request(f"r{n}", [60 + n] * 20, seed=n, max_tokens=90, constraint=schema(form))
            for n in range(4)
        ]

    calm, hurried = held(), held()
    run_all(calm)
    run_all(hurried, num_blocks=8)
    assert sum(request.num_preemptions for request in hurried) > 0
    assert [r.output_token_ids for r in hurried] == [r.output_token_ids for r in calm]


def test_several_answers_of_one_prompt_follow_the_grammar_each() -> None:
    requests = [
        make_request(f"r{n}", [70] * 40, seed=n, constraint=schema(PERSON)) for n in range(3)
    ]
    for request in requests[1:]:
        request.fork_of = "r0"
    run_all(requests)
    assert len({text_of(request) for request in requests}) == 3
    for request in requests:
        assert fits(json.loads(text_of(request)), PERSON)
