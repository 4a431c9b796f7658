"""Schemas, expressions and grammars that no answer is held to (A23)."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.errors import InvalidConstraint
from inference.grammar import compiler as compiler_module
from inference.grammar import matcher as matcher_module
from inference.grammar.compiler import GrammarCompiler
from inference.grammar.constraint import Constraint
from inference.request import FinishReason
from inference.text.tokenizer import Tokenizer
from tests.inference.structured import (
    COMPILER,
    PERSON,
    VOCAB_SIZE,
    make_request,
    run_all,
    schema,
    token_of,
)

BAD = {
    "no schema": {"type": "object", "properties": {"foo": "bar"}},
    "look behind": {"type": "string", "pattern": "(?<=x)*"},
    "2000 brackets": {"type": "string", "pattern": "(" * 2000 + "a" + ")" * 2000},
    "refers to itself": {"$ref": "#"},
    "refers in a circle": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    },
    "refers to nothing": {"$ref": "#/$defs/none"},
    "refers to the web": {"$ref": "http://127.0.0.1/schema.json"},
    "unknown type": {"type": "yaml"},
    "unknown keyword": {"type": "array", "uniqueItems": True},
    "impossible": {"type": "integer", "minimum": 5, "maximum": 1},
    "too large": {"enum": [str(n) for n in range(40_000)]},
    "too many ways": {
        "allOf": [
            {"anyOf": [{"properties": {f"k{i}_{j}": {"type": "string"}}} for i in range(20)]}
            for j in range(20)
        ]
    },
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_schema_is_refused_by_name_and_at_once_a23(name: str) -> None:
    started = time.thread_time()
    with pytest.raises(InvalidConstraint, match="response_format") as refused:
        COMPILER.compile_now(schema(BAD[name]))
    assert time.thread_time() - started < 1.0
    assert refused.value.param == "response_format"
    assert len(str(refused.value)) < 500


def test_what_costs_too_much_once_it_is_begun_is_refused_before_a23(
    bundled_model_dir: Path,
) -> None:
    tokenizer = Tokenizer.from_dir(bundled_model_dir)
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=[2])
    keys = {f"p{n}": {"type": "integer"} for n in range(3000)}
    with pytest.raises(InvalidConstraint, match="cannot be followed"):
        compiler.compile_now(schema({"type": "object", "properties": keys}))
    for served in (schema(PERSON), Constraint("regex", "(ab|cd){1,9}"), Constraint("json_object")):
        assert compiler.compile_now(served)


NESTED = "((a{1,50}){1,50}){1,50}"
COSTLY = {
    "a regular expression": Constraint("regex", NESTED),
    "words of words": Constraint("regex", r"((\w{1,50} ?){1,50}){1,50}"),
    "a grammar": Constraint("lark", f"start: A\nA: /{NESTED}/"),
    "a pattern": schema({"type": "string", "pattern": f"^{NESTED}$"}),
    "a pattern behind free text": schema(
        {
            "type": "object",
            "properties": {"text": {"type": "string"}, "code": {"$ref": "#/$defs/code"}},
            "required": ["text", "code"],
            "$defs": {"code": {"type": "string", "pattern": f"^{NESTED}$"}},
        }
    ),
    "a pattern in a piece": Constraint.of_json(
        "pieces", ["x" * 100, {"schema": {"type": "string", "pattern": f"^{NESTED}$"}}]
    ),
}


@pytest.mark.parametrize("name", COSTLY)
def test_nested_repetition_is_refused_before_anything_is_queued_a23(name: str) -> None:
    with pytest.raises(InvalidConstraint, match=r"response_format .* too many ways"):
        COMPILER.compile_now(COSTLY[name])


@pytest.mark.parametrize(
    "form",
    [
        {"const": {"pattern": NESTED}},
        {"enum": [{"pattern": NESTED}, 3]},
        {"type": "object", "properties": {"pattern": {"type": "string"}}},
        {"type": "string", "pattern": "^([a-z]{1,20} ?){1,20}$"},
    ],
)
def test_a_pattern_that_is_data_or_modest_is_served_a23(form: Any) -> None:
    assert COMPILER.compile_now(schema(form))


def test_a_cost_that_shows_late_is_a_refusal_and_harms_nobody_a23() -> None:
    """Two answers of one form: one walks into what costs too much, the other does not."""
    late = Constraint("regex", "[ab]{50}(c|(a{1,500}){1,500})")

    def scores(context):
        letter = "a" if context[0] == 40 or len(context) % 2 else "b"
        wanted = "c" if context[0] != 40 and len(context) >= 50 + 3 else letter
        return torch.nn.functional.one_hot(torch.tensor(token_of(wanted)), VOCAB_SIZE).float()

    requests = [
        make_request("costly", [40, 41, 42], temperature=0.0, constraint=late),
        make_request("cheap", [43, 41, 42], temperature=0.0, constraint=late),
        make_request("free", [44, 41], max_tokens=300, ignore_eos=True),
    ]
    run_all(requests, scores=scores)
    costly, cheap, free = requests
    assert costly.finish_reason is FinishReason.REFUSED
    assert "the form that was asked for" in (costly.finish_detail or "")
    assert len(costly.output_token_ids) > 50
    assert cheap.finish_reason is FinishReason.STOP
    assert free.finish_reason is FinishReason.LENGTH


def test_a_mask_that_takes_too_long_ends_its_own_request_only_a23(monkeypatch) -> None:
    """A processor time that no mask keeps to stands for a grammar made to stall the server."""
    bad = make_request("bad", constraint=schema(PERSON))
    monkeypatch.setattr(matcher_module, "MAX_MASK_S", -1.0)
    free = make_request("free", max_tokens=5, ignore_eos=True)
    run_all([bad, free])
    assert bad.finish_reason is FinishReason.REFUSED
    assert "the form that was asked for" in (bad.finish_detail or "")
    assert free.finish_reason is FinishReason.LENGTH


def test_what_took_too_long_to_compile_is_refused_a23(monkeypatch) -> None:
    """How long many repeats take is the machine's; what is done then is not."""
    repeats = schema({"type": "string", "pattern": "^((a{9}){9}){9}$"})
    monkeypatch.setattr(compiler_module, "_MAX_COMPILE_S", 0.0)
    with pytest.raises(InvalidConstraint, match="takes too long to compile"):
        COMPILER.compile_now(repeats)


def deep(levels: int) -> dict[str, Any]:
    form: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        form = {"type": "array", "items": form}
    return form


@pytest.mark.parametrize("levels", [200, 100_000])
def test_nesting_is_bounded_a23(levels: int) -> None:
    with pytest.raises(InvalidConstraint, match="response_format"):
        schema(deep(levels)).check()


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("regex", "("),
        Constraint("regex", "a" * 10_000),
        Constraint("regex", ""),
        Constraint("regex", "(" * 200 + ")" * 200),
        Constraint("lark", "start: missing"),
        Constraint("lark", "start: start"),
        Constraint("json_schema", "no JSON"),
        Constraint("json_schema", "[1]"),
        Constraint("yaml"),  # type: ignore[arg-type]
    ],
)
def test_other_constraints_are_refused_by_name(constraint: Constraint) -> None:
    with pytest.raises(InvalidConstraint, match="response_format"):
        COMPILER.compile_now(constraint)


@pytest.mark.parametrize(
    "form",
    [
        {"type": "string", "pattern": "(a+)+$"},
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
    ],
)
def test_what_only_looks_bad_is_served_a23(form: Any) -> None:
    request = make_request("r", max_tokens=20, constraint=schema(form))
    run_all([request])
    assert request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


def test_a_lenient_schema_leaves_out_what_is_not_known() -> None:
    form = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    COMPILER.compile_now(schema(form, is_lenient=True))
    with pytest.raises(InvalidConstraint, match="tools"):
        COMPILER.compile_now(schema({"type": "yaml"}, is_lenient=True, param="tools"))
