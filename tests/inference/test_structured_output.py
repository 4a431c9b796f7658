"""Answers held to a schema, a regular expression or a grammar (A23)."""

import asyncio
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from inference.engine import Engine
from inference.errors import InvalidConstraint, QueueFull
from inference.generator import TextGenerator
from inference.grammar import compiler as compiler_module
from inference.grammar import matcher as matcher_module
from inference.grammar.compiler import GrammarCompiler
from inference.grammar.constraint import Constraint
from inference.outputs import GenerationFinished, TextDelta
from inference.request import FinishReason
from inference.sampling_params import SamplingParams
from inference.text.chat_template import ChatTemplate
from inference.text.tokenizer import Tokenizer
from tests.inference.helpers import fake_config
from tests.inference.structured import (
    COMPILER,
    EOS,
    TOKENIZER,
    VOCAB_SIZE,
    ScoringRunner,
    make_request,
    random_scores,
    run_all,
    text_of,
    token_of,
)

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema(value: Any, **fields: Any) -> Constraint:
    return Constraint.of_json("json_schema", value, **fields)


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


def fits(value: Any, form: dict[str, Any]) -> bool:
    """Whether `value` fulfils a schema of the kinds above."""
    if "anyOf" in form:
        return any(fits(value, each) for each in form["anyOf"])
    if "enum" in form or "const" in form:
        return value in form.get("enum", [form.get("const")])
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match form["type"]:
        case "integer":
            low, high = form.get("minimum", value), form.get("maximum", value)
            return is_number and value == int(value) and low <= value <= high
        case "number":
            return is_number
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "string":
            is_short = isinstance(value, str) and len(value) <= form.get("maxLength", len(value))
            return is_short and bool(re.search(form.get("pattern", ""), value))
        case "array":
            is_right = isinstance(value, list) and 1 <= len(value) <= form["maxItems"]
            return is_right and all(fits(each, form["items"]) for each in value)
        case _:
            known = form["properties"]
            return (
                isinstance(value, dict)
                and set(form["required"]) <= value.keys() <= known.keys()
                and all(fits(value[name], known[name]) for name in value)
            )


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


def test_a_grammar_that_fails_ends_its_own_request_only(monkeypatch) -> None:
    """A processor time that no mask keeps to stands for a grammar made to stall the server."""
    bad = make_request("bad", constraint=schema(PERSON))
    monkeypatch.setattr(matcher_module, "MAX_MASK_S", -1.0)
    free = make_request("free", max_tokens=5, ignore_eos=True)
    run_all([bad, free])
    assert bad.finish_reason is FinishReason.ERROR
    assert "the form that was asked for" in (bad.finish_detail or "")
    assert free.finish_reason is FinishReason.LENGTH


# ---- refusals -----------------------------------------------------------------------------------

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


# ---- compiling ----------------------------------------------------------------------------------


def fresh_compiler() -> compiler_module.GrammarCompiler:
    return compiler_module.GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))


async def test_equal_constraints_are_compiled_once_and_few_are_kept(monkeypatch) -> None:
    monkeypatch.setattr(compiler_module, "_MAX_CACHED", 3)
    compiler = fresh_compiler()
    first = await compiler.compile(schema(PERSON))
    assert await compiler.compile(schema(PERSON)) is first
    for n in range(3):
        await compiler.compile(Constraint("regex", f"a{n}"))
    assert len(compiler._cache) == 3
    assert await compiler.compile(schema(PERSON)) is not first


async def test_many_schemas_at_once_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(compiler_module, "_MAX_PENDING", 2)
    compiler = fresh_compiler()
    attempts = [compiler.compile(Constraint("regex", f"a{n}")) for n in range(5)]
    results = await asyncio.gather(*attempts, return_exceptions=True)
    assert sum(isinstance(result, QueueFull) for result in results) == 3
    await compiler.compile(Constraint("regex", "later"))


async def test_a_caller_does_not_wait_for_ever(monkeypatch) -> None:
    monkeypatch.setattr(compiler_module, "_MAX_WAIT_S", 0.01)
    compiler, may_end = fresh_compiler(), threading.Event()
    monkeypatch.setattr(compiler, "compile_now", lambda constraint: may_end.wait(20))
    try:
        with pytest.raises(InvalidConstraint, match="too long"):
            await compiler.compile(schema(PERSON))
    finally:
        may_end.set()


async def test_the_generator_refuses_before_anything_is_queued_and_serves_what_is_right() -> None:
    runner = ScoringRunner()
    engine = Engine(fake_config(), runner)
    engine.start()
    try:
        engine.wait_ready(20)
        generator = TextGenerator(engine, TOKENIZER, ChatTemplate(None, TOKENIZER))
        bad = SamplingParams(constraint=schema(BAD["unknown type"]))
        with pytest.raises(InvalidConstraint):
            await generator.prepare("hello", bad)
        assert not runner.outputs
        params = SamplingParams(max_tokens=400, seed=3, constraint=schema(PERSON))
        prepared = await generator.prepare("hello", params)
        async with generator.stream(
            prepared, params, request_id="r", owner="a", cache_scope="a"
        ) as stream:
            events = [event async for event in stream]
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        assert fits(json.loads(text), PERSON)
        assert isinstance(events[-1], GenerationFinished)
        assert events[-1].finish_reason is FinishReason.STOP
    finally:
        engine.shutdown(0.0)
