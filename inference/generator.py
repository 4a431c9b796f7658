"""Conversations in, text out: template and tokenizer before the engine, detokenizer behind it.

Usable without any web. Runs on an event loop; templates and long texts go to worker threads.
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol, Self

from inference.engine_checks import check_request
from inference.errors import InferenceError, InvalidPrompt
from inference.grammar.compiler import GrammarCompiler
from inference.grammar.matcher import Grammar
from inference.outputs import (
    GenerationFinished,
    PromptProgress,
    QueueUpdate,
    RunnerInfo,
    StreamUpdate,
    TextDelta,
    TextEvent,
    TextLogprob,
)
from inference.request import FinishReason, Request, RequestClass
from inference.sampling_params import SamplingParams
from inference.text.chat_template import ChatTemplate
from inference.text.detokenizer import Detokenized, Detokenizer
from inference.text.tokenizer import Tokenizer

# How long `aclose` waits for the engine to say how many tokens it made.
_LAST_UPDATE_S = 5.0

# Messages, a text, or token ids.
Prompt = Sequence[Mapping[str, Any]] | str | Sequence[int]


class UpdateStream(Protocol):
    """What the generator needs of `streams.RequestStream`."""

    async def __anext__(self) -> StreamUpdate: ...
    async def aclose(self) -> None: ...


class GeneratingEngine(Protocol):
    """What the generator needs of `engine.Engine`."""

    @property
    def info(self) -> RunnerInfo: ...
    @property
    def max_len(self) -> int: ...
    def add_request(self, request: Request) -> UpdateStream: ...
    def abort(
        self, request_id: str, finish_reason: FinishReason = ..., detail: str | None = ...
    ) -> bool: ...


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A checked prompt; nothing is queued yet."""

    token_ids: list[int]
    # Most tokens the answer can have: max_tokens, cut to what the context leaves.
    max_new_tokens: int
    # Leading tokens that are the server's own text.
    num_public_prefix_tokens: int = 0
    is_chat: bool = False
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
    ) -> PreparedPrompt:
        """Tokenise, check, and compile the constraint if there is one, in worker threads.

        Args:
            prompt: messages, a text (gets what the model wants in front), or token ids (gets
                nothing in front).
            server_prompt: the server's own instructions, before the messages' own; its tokens are
                shared between all users' caches.

        Raises:
            InvalidPrompt, PromptTooLong, InvalidSamplingParams, InvalidConstraint: nothing was
                queued.
        """
        info = self._engine.info
        params.validate(vocab_size=info.vocab_size)
        prepared = await asyncio.to_thread(
            self._prepare, prompt, params, info, server_prompt, tools, template_options
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
            strip_first_space=prepared.is_chat and self._tokenizer.strips_first_space,
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
        info: RunnerInfo,
        server_prompt: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        template_options: Mapping[str, Any] | None,
    ) -> PreparedPrompt:
        num_public, is_chat = 0, False
        if isinstance(prompt, str):
            token_ids = self._tokenizer.encode_prompt(prompt)
        elif prompt and all(isinstance(message, Mapping) for message in prompt):
            rendered = self._chat_template.encode(
                prompt,  # type: ignore[arg-type]
                server_prompt=server_prompt,
                tools=tools,
                options=template_options,
            )
            token_ids, num_public = rendered.token_ids, rendered.num_public_prefix_tokens
            is_chat = True
        else:
            token_ids = _checked_ids(prompt)
        if not token_ids:
            raise InvalidPrompt("The prompt is empty; it needs at least one token.", param="prompt")
        max_len = self._engine.max_len
        probe = Request(
            request_id="", prompt_token_ids=token_ids, params=params, owner="", cache_scope=""
        )
        check_request(probe, info, max_len)
        room = max_len - len(token_ids)
        max_new_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        return PreparedPrompt(token_ids, max_new_tokens, num_public, is_chat)


class TextStream:
    """Events of one generation; the last is its one GenerationFinished.

    Close it, or use it in `async with`: leaving before the last event, and cancelling a pending
    `__anext__`, abort the request. The counts stay readable and true afterwards.
    """

    def __init__(
        self,
        engine: GeneratingEngine,
        request: Request,
        updates: UpdateStream,
        detokenizer: Detokenizer,
    ) -> None:
        self.request_id = request.request_id
        self.num_prompt_tokens = request.num_prompt_tokens
        # Prompt tokens that were found in the prefix cache.
        self.num_cached_tokens = 0
        # Set with the last event, or by `aclose`.
        self.finish_reason: FinishReason | None = None
        self._engine = engine
        self._request = request
        self._updates = updates
        self._detokenizer = detokenizer
        self._events: deque[TextEvent] = deque()
        self._first_delta_s: float | None = None
        self._last_progress: PromptProgress | None = None

    @property
    def num_completion_tokens(self) -> int:
        """Tokens that the engine made, up to the one that completed a stop string."""
        return self._detokenizer.num_tokens

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextEvent:
        while not self._events:
            if self.finish_reason is not None:
                raise StopAsyncIteration
            await self._read()
        return self._events.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the request if it still runs; returns when its last token is counted. Idempotent."""
        self._events.clear()
        if self.finish_reason is not None:
            return
        self._engine.abort(self.request_id)
        try:
            async with asyncio.timeout(_LAST_UPDATE_S):
                while self.finish_reason is None:
                    await self._read()
        except TimeoutError:
            self.finish_reason = FinishReason.ABORT
        finally:
            self.finish_reason = self.finish_reason or FinishReason.ABORT
            self._events.clear()
            await self._updates.aclose()

    async def _read(self) -> None:
        """Take the next update and turn it into events."""
        try:
            update = await anext(self._updates)
        except StopAsyncIteration:
            self._finish(FinishReason.ABORT, None)
            return
        except InferenceError as exc:
            self._finish(FinishReason.ERROR, str(exc))
            return
        except asyncio.CancelledError:
            self._engine.abort(self.request_id)
            raise
        self._add_waiting_events(update)
        self._add_text(self._detokenizer.feed(update.token_ids, update.logprobs))
        if self._detokenizer.stop_found is not None:
            stop = self._detokenizer.stop_found
            self._engine.abort(self.request_id, FinishReason.STOP, stop)
            self._finish(FinishReason.STOP, stop)
            await self._updates.aclose()
        elif update.finish_reason is not None:
            self._finish(update.finish_reason, update.finish_detail)

    def _add_waiting_events(self, update: StreamUpdate) -> None:
        self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
        if update.queue_position is not None:
            self._events.append(QueueUpdate(update.queue_position, update.estimated_wait_s))
            return
        if update.finish_reason is not None or self.num_completion_tokens:
            return
        progress = PromptProgress(
            update.num_computed_prompt_tokens, self.num_prompt_tokens, self.num_cached_tokens
        )
        if progress.num_computed_tokens and progress != self._last_progress:
            self._last_progress = progress
            self._events.append(progress)

    def _add_text(self, new: Detokenized) -> None:
        if not new.text and not new.logprobs:
            return
        if self._first_delta_s is None:
            self._first_delta_s = time.monotonic()
        self._events.append(TextDelta(new.text, self.num_completion_tokens, new.logprobs))

    def _finish(self, reason: FinishReason, detail: str | None) -> None:
        self._add_text(self._detokenizer.finish())
        now_s, arrival_s = time.monotonic(), self._request.arrival_s
        started_s = self._request.first_scheduled_s
        self.finish_reason = reason
        self._events.append(
            GenerationFinished(
                finish_reason=reason,
                detail=detail,
                num_prompt_tokens=self.num_prompt_tokens,
                num_cached_tokens=self.num_cached_tokens,
                num_completion_tokens=self.num_completion_tokens,
                queue_s=(now_s if started_s is None else started_s) - arrival_s,
                ttft_s=None if self._first_delta_s is None else self._first_delta_s - arrival_s,
                duration_s=now_s - arrival_s,
                has_started=started_s is not None,
            )
        )


def _checked_ids(prompt: Sequence[Any]) -> list[int]:
    for token_id in prompt:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidPrompt(
                f"The prompt holds {str(token_id)[:40]!r}; a prompt is a text, a list of messages, "
                "or a list of whole token ids.",
                param="prompt",
            )
    return list(prompt)
