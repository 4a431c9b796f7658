"""An engine whose model is a heap of random scores, sampled for real: for tests of grammars."""

import re
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from inference.engine import Engine
from inference.grammar.compiler import GrammarCompiler
from inference.grammar.constraint import Constraint
from inference.outputs import SchedulerOutput, StepOutput
from inference.request import Request
from inference.sampler import Sampler
from inference.sampling_params import SamplingParams
from tests.inference.helpers import FakeRunner, fake_config
from tests.inference.text_models import byte_level_metadata, make_tokenizer

TOKENIZER = make_tokenizer(byte_level_metadata())
EOS = 0
VOCAB_SIZE = TOKENIZER.vocab_size


def token_of(text: str) -> int:
    return next(n for n in range(VOCAB_SIZE) if TOKENIZER.token_bytes(n) == text.encode())


# Without these a random answer would hardly ever close what it opened.
ENDING_IDS = [EOS, *(token_of(letter) for letter in '"}],')]


def random_scores(context: Sequence[int]) -> Tensor:
    """[VOCAB_SIZE]: the same for the same context."""
    generator = torch.Generator().manual_seed(zlib.crc32(array("q", context).tobytes()))
    scores = torch.randn(VOCAB_SIZE, generator=generator)
    scores[ENDING_IDS] += 4.0
    return scores


class ScoringRunner(FakeRunner):
    """Samples from `scores(context)`; the context is read through the block tables."""

    def __init__(
        self, scores: Callable[[Sequence[int]], Tensor] = random_scores, **changes: int
    ) -> None:
        super().__init__(**{"num_blocks": 256, "block_size": 16, **changes})
        self.info = replace(self.info, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
        self.sampler = Sampler(VOCAB_SIZE, (EOS,))
        self.scores = scores

    def execute(self, scheduler_output: SchedulerOutput) -> StepOutput:
        self.sampler.forget(scheduler_output.finished_request_ids)
        output = super().execute(scheduler_output)
        parts = [part for part in scheduler_output.scheduled if part.samples]
        if not parts:
            return output
        contexts = [
            self._read(part.block_table, part.start + part.num_new_tokens) for part in parts
        ]
        logits = torch.stack([self.scores(context) for context in contexts])
        requests = [part.request for part in parts]
        sampled = self.sampler.sample(logits, requests)
        output.tokens = {
            request.request_id: token for request, token in zip(requests, sampled, strict=True)
        }
        return output


COMPILER = GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))


def make_request(name: str, prompt: Sequence[int] = (40, 41, 42), **params: object) -> Request:
    sampling = SamplingParams(**{"max_tokens": 400, "seed": 1, **params})  # type: ignore[arg-type]
    constraint = sampling.constraint
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        params=sampling,
        owner="user:1",
        cache_scope="user:1",
        grammar=None if constraint is None else COMPILER.compile_now(constraint),
    )


def run_all(
    requests: Sequence[Request], *, scores=random_scores, check: bool = True, **changes: int
) -> ScoringRunner:
    """Serve the requests together to their ends, every invariant checked after each step."""
    runner = ScoringRunner(scores, **changes)
    engine = Engine(fake_config(max_num_seqs=len(requests)), runner)
    engine.load()
    for request in requests:
        engine.add_request(request)
    while any(request.finish_reason is None for request in requests):
        assert engine.step(), "requests are left that never end"
        if check:
            engine._scheduler.check_integrity()
    engine.shutdown(0.0)
    return runner


def text_of(request: Request) -> str:
    return TOKENIZER.decode(request.output_token_ids)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema(value: Any, **fields: Any) -> Constraint:
    return Constraint.of_json("json_schema", value, **fields)


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
