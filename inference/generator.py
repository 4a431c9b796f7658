"""Conversations in, text out: template and tokenizer before the engine, detokenizer behind it.

Usable without any web. Runs on an event loop; templates and long texts go to worker threads.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inference.engine_checks import check_request, prompt_too_long
from inference.errors import InvalidPrompt
from inference.grammar.compiler import GrammarCompiler
from inference.grammar.matcher import Grammar
from inference.outputs import GenerationFinished, TextDelta, TextLogprob
from inference.request import Request, RequestClass
from inference.sampling_params import SamplingParams
from inference.text.chat_template import ChatTemplate
from inference.text.detokenizer import Detokenizer
from inference.text.tokenizer import TextTooLong, Tokenizer
from inference.text_stream import GeneratingEngine, TextStream

# Messages, a text, or token ids.
Prompt = Sequence[Mapping[str, Any]] | str | Sequence[int]


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A checked prompt; nothing is queued yet."""

    token_ids: list[int]
    # Most tokens the answer can have: max_tokens, cut to what the context leaves.
    max_new_tokens: int
    # Leading tokens that are the server's own text.
    num_public_prefix_tokens: int = 0
    # The answer is a text of its own: some tokenizers put a blank in front, which is no part of it.
    begins_answer: bool = False
    # What `params.constraint` compiles to.
    grammar: Grammar | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer."""

    text: str
    finished: GenerationFinished
    logprobs: list[TextLogprob] = field(default_factory=list)


class TextGenerator:
    """One loaded model, as text. Every method but `generate` belongs to an event loop."""

    def __init__(
        self, engine: GeneratingEngine, tokenizer: Tokenizer, chat_template: ChatTemplate
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._grammars: GrammarCompiler | None = None

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        server_prompt: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        answer_start: str = "",
    ) -> PreparedPrompt:
        """Tokenise, check, and compile the constraint if there is one, in worker threads.

        Args:
            prompt: messages, a text (gets what the model wants in front), or token ids (gets
                nothing in front).
            server_prompt: the server's own instructions, before the messages' own; its tokens are
                shared between all users' caches.
            add_generation_prompt, continue_final_message: see `ChatTemplate.encode`.
            answer_start: the server's own text with which the answer begins; part of the prompt.

        Raises:
            InvalidPrompt, PromptTooLong, InvalidSamplingParams, InvalidConstraint: nothing was
                queued.
        """
        info = self._engine.info
        params.validate(vocab_size=info.vocab_size)
        prepared = await asyncio.to_thread(
            self._prepare,
            prompt,
            params,
            answer_start,
            server_prompt=server_prompt,
            tools=tools,
            options=template_options,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        if params.constraint is not None:
            grammar = await self.grammars.compile(params.constraint)
            prepared = replace(prepared, grammar=grammar)
        return prepared

    @property
    def grammars(self) -> GrammarCompiler:
        """Of the loaded model. Raises EngineStopping: it is still loading."""
        if self._grammars is None:
            info = self._engine.info
            self._grammars = GrammarCompiler(
                self._tokenizer, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids
            )
        return self._grammars

    def stream(
        self,
        prepared: PreparedPrompt,
        params: SamplingParams,
        *,
        request_id: str,
        owner: str,
        cache_scope: str,
        request_class: RequestClass = RequestClass.API,
        labels: Mapping[str, str] | None = None,
        queue_deadline_s: float | None = None,
        fork_of: str | None = None,
    ) -> "TextStream":
        """Queue the request now and return its events. See `Request` for what the names mean.

        Raises:
            RequestRejected: one of its kinds; nothing was queued.
            EngineDead: the engine has ended.
        """
        request = Request(
            request_id=request_id,
            prompt_token_ids=prepared.token_ids,
            params=params,
            owner=owner,
            cache_scope=cache_scope,
            request_class=request_class,
            labels=labels or {},
            num_public_prefix_tokens=prepared.num_public_prefix_tokens,
            arrival_s=time.monotonic(),
            queue_deadline_s=queue_deadline_s,
            fork_of=fork_of,
            grammar=prepared.grammar,
        )
        ending_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            ending_ids.update(self._engine.info.eos_token_ids)
        detokenizer = Detokenizer(
            self._tokenizer,
            stop=params.stop,
            ending_ids=ending_ids,
            min_tokens=params.min_tokens,
            strip_first_space=prepared.begins_answer and self._tokenizer.strips_first_space,
        )
        return TextStream(self._engine, request, self._engine.add_request(request), detokenizer)

    async def collect(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str, owner: str = "local"
    ) -> Generation:
        """Prepare, stream, and return the whole answer."""
        prepared = await self.prepare(prompt, params)
        texts: list[str] = []
        logprobs: list[TextLogprob] = []
        async with self.stream(
            prepared, params, request_id=request_id, owner=owner, cache_scope=owner
        ) as stream:
            async for event in stream:
                if isinstance(event, TextDelta):
                    texts.append(event.text)
                    logprobs += event.logprobs
                elif isinstance(event, GenerationFinished):
                    return Generation("".join(texts), event, logprobs)
        raise AssertionError("a stream ended without its last event")

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str = "generate",
        owner: str = "local",
    ) -> Generation:
        """`collect` for code without an event loop: tests and benchmarks."""
        return asyncio.run(self.collect(prompt, params, request_id=request_id, owner=owner))

    def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        answer_start: str,
        **template: Any,
    ) -> PreparedPrompt:
        max_len = self._engine.max_len
        begins_answer = False
        try:
            token_ids, num_public = self._encode(prompt, max_len, template)
        except TextTooLong as exc:
            info = self._engine.info
            raise prompt_too_long(exc.num_tokens, info, max_len, at_least=True) from exc
        if prompt and isinstance(prompt[0], Mapping):
            begins_answer = not (answer_start or template["continue_final_message"])
        if answer_start:
            token_ids = [*token_ids, *self._tokenizer.encode(answer_start, allow_special=True)]
        if not token_ids:
            raise InvalidPrompt("The prompt is empty; it needs at least one token.", param="prompt")
        probe = Request(
            request_id="", prompt_token_ids=token_ids, params=params, owner="", cache_scope=""
        )
        check_request(probe, self._engine.info, max_len)
        room = max_len - len(token_ids)
        max_new_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        return PreparedPrompt(token_ids, max_new_tokens, num_public, begins_answer)

    def _encode(
        self, prompt: Prompt, max_len: int, template: Mapping[str, Any]
    ) -> tuple[list[int], int]:
        """Its ids, and how many of them are the server's own. Raises TextTooLong."""
        if isinstance(prompt, str):
            return self._tokenizer.encode_prompt(prompt, most_tokens=max_len), 0
        if prompt and all(isinstance(message, Mapping) for message in prompt):
            rendered = self._chat_template.encode(
                prompt,  # type: ignore[arg-type]
                **template,
                most_tokens=max_len,
            )
            return rendered.token_ids, rendered.num_public_prefix_tokens
        return _checked_ids(prompt), 0


def _checked_ids(prompt: Sequence[Any]) -> list[int]:
    for token_id in prompt:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidPrompt(
                f"The prompt holds {str(token_id)[:40]!r}; a prompt is a text, a list of messages, "
                "or a list of whole token ids.",
                param="prompt",
            )
    return list(prompt)
