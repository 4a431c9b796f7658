"""The generations of one API request: opened together, read together, closed together.

`Reply` knows no dialect. It gives batches: whatever all its generations said since the last look,
so that a caller who was busy sending finds several tokens at once and sends them in one piece.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from appliance.api.tools import CallReader, ToolCall
from appliance.api_keys.services import api_key_is_live
from appliance.brief_log import OnceAMinute
from appliance.errors import (
    ApplianceError,
    BadRequest,
    EngineUnavailable,
    GenerationFailed,
    NotAuthenticated,
)
from appliance.serving.booking import STORAGE_FAULTS, in_db_thread
from appliance.serving.gateway import gateway_is_admitting
from appliance.serving.news import News
from appliance.serving.services import Generation, generation_open
from appliance.serving.turns import Told
from appliance.serving.types import Delta, Finished, GenerationEvent, GenerationRequest, Queued

logger = logging.getLogger(__name__)
_trouble = OnceAMinute(logger, logging.WARNING)

# How often a running answer looks whether its key still holds.
KEY_CHECK_S = 5.0


@dataclass(slots=True)
class Piece:
    """What one choice said in one batch."""

    index: int
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finished: Finished | None = None
    calls: list[ToolCall] = field(default_factory=list)
    # Whether any call was made, in this batch or before.
    has_called: bool = False

    @property
    def finish_reason(self) -> str | None:
        if self.finished is None:
            return None
        if self.finished.finish_reason == "stop" and self.has_called:
            return "tool_calls"
        return self.finished.finish_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageCount:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    def as_openai(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


async def reply_open(
    requests: Sequence[GenerationRequest],
    *,
    choices_per_prompt: int = 1,
    readers: Sequence[CallReader] = (),
    told: Told | None = None,
) -> "Reply":
    """Admit every generation or none. Raises what `generation_open` raises.

    Args:
        readers: one a choice when there are tools.
        told: gets the place in line while a limit's rule lets one of them wait.
    """
    generations: list[Generation] = []
    try:
        for request in requests:
            generations.append(await generation_open(request, told=told))
    except BaseException:
        for generation in generations:
            generation.withdraw()
        raise
    return Reply(generations, choices_per_prompt, requests[0].caller.key_id, readers)


class Reply:
    """Read with `next_pieces` until it gives None; `aclose` always."""

    def __init__(
        self,
        generations: Sequence[Generation],
        choices_per_prompt: int,
        key_id: int | None,
        readers: Sequence[CallReader] = (),
    ) -> None:
        self.generations = generations
        self._readers = readers
        self.finished: dict[int, Finished] = {}
        self._choices_per_prompt = choices_per_prompt
        self._key_id = key_id
        self._key_check_at = time.monotonic() + KEY_CHECK_S
        self._failure: ApplianceError | None = None
        self._failure_is_next = False
        # How many the engine serves before it; None once it is read or said nothing of it.
        self.ahead: int | None = None
        # By number; one leaves when its last event is taken.
        self._open = dict(enumerate(generations))
        self._news = News()
        for generation in generations:
            generation.listen(self._news)
        # There may be something already.
        self._news.ring()

    @property
    def request_id(self) -> str:
        return self.generations[0].request_id

    async def next_pieces(self, timeout_s: float) -> list[Piece] | None:
        """New text and ends, at most one piece a choice; empty at the time-out, None at the end.

        Raises:
            ApplianceError: a generation failed or was stopped, or the key was revoked.
        """
        if self._open and self._failure is None:
            await self._news.wait(timeout_s)
        events = self._take()
        await self._check_key()
        if events and not self._failure_is_next:
            pieces = self._pieces(events)
            # What was said before a failure is still given; then nothing of any choice is.
            self._failure_is_next = self._failure is not None
            return pieces
        if self._failure is not None:
            raise self._failure
        return [] if self._open else None

    @property
    def is_whole(self) -> bool:
        """Whether everything was given: the next call would say None."""
        return not self._open and self._failure is None

    def usage(self) -> UsageCount:
        """Each prompt once, every choice's answer."""
        ends = [self.finished[index] for index in range(len(self.generations))]
        firsts = ends[:: self._choices_per_prompt]
        return UsageCount(
            prompt_tokens=sum(end.prompt_tokens for end in firsts),
            cached_tokens=sum(end.cached_tokens for end in firsts),
            completion_tokens=sum(end.completion_tokens for end in ends),
        )

    async def aclose(self) -> None:
        """End what still runs. Safe twice and when cancelled."""
        self._news.close()
        for generation in self.generations:
            generation.close_soon()
        for generation in self.generations:
            await generation.aclose()

    def _take(self) -> list[tuple[int, GenerationEvent]]:
        """What all choices said since the last look."""
        events: list[tuple[int, GenerationEvent]] = []
        for index, generation in tuple(self._open.items()):
            try:
                taken = generation.take()
            # An edge like that of a socket's task: whatever happens there, the caller is told.
            except Exception as exc:
                del self._open[index]
                self._failure = _failure_of(exc, generation)
                continue
            events += [(index, event) for event in taken]
            if taken and isinstance(taken[-1], Finished):
                del self._open[index]
        return events

    def _pieces(self, events: list[tuple[int, GenerationEvent]]) -> list[Piece]:
        pieces: dict[int, Piece] = {}
        for index, event in events:
            self.ahead = event.ahead if isinstance(event, Queued) else None
            if isinstance(event, Delta):
                piece = pieces.get(index) or pieces.setdefault(index, Piece(index))
                piece.text += event.text
                if event.logprobs:
                    piece.logprobs.extend(event.logprobs)
            elif isinstance(event, Finished):
                self.finished[index] = event
                piece = pieces.get(index) or pieces.setdefault(index, Piece(index))
                piece.finished = event
                if event.finish_reason in ("error", "abort") and self._failure is None:
                    self._failure = _broken(event)
        for piece in pieces.values() if self._readers else ():
            _read_calls(piece, self._readers[piece.index])
        return list(pieces.values())

    async def _check_key(self) -> None:
        now = time.monotonic()
        if self._key_id is None or now < self._key_check_at:
            return
        self._key_check_at = now + KEY_CHECK_S
        try:
            is_live = await in_db_thread(api_key_is_live, self._key_id)
        except STORAGE_FAULTS as exc:
            # What runs goes on; it is asked again soon.
            _trouble.log("keys of running answers cannot be checked now: %s", exc)
            return
        if not is_live:
            raise NotAuthenticated("This API key was revoked or has expired: the answer ends here.")


def _read_calls(piece: Piece, reader: CallReader) -> None:
    piece.text, piece.calls = reader.feed(piece.text)
    if piece.finished is not None:
        text, calls = reader.finish()
        piece.text += text
        piece.calls += calls
    piece.has_called = reader.num_calls > 0


def _failure_of(exc: Exception, generation: Generation) -> ApplianceError:
    if isinstance(exc, ApplianceError):
        return exc
    logger.error("generation %s broke", generation.request_id, exc_info=exc)
    return GenerationFailed("The server failed during this answer.")


def _broken(event: Finished) -> ApplianceError:
    # What the end of the server cuts off is no fault of the answer: it may be asked for again.
    is_away = event.error_code == EngineUnavailable.code or not gateway_is_admitting()
    if event.finish_reason == "abort" or is_away:
        return EngineUnavailable(event.error or "This answer was stopped on the server.")
    if event.error_code == BadRequest.code and event.error:
        return BadRequest(event.error)
    return GenerationFailed(event.error or "The server failed during this answer.")


async def reply_collect(reply: Reply) -> list[Piece]:
    """Read to the end: one whole piece a choice. Closes the reply in any case."""
    wholes = [Piece(index) for index in range(len(reply.generations))]
    texts: list[list[str]] = [[] for _ in wholes]
    try:
        while (pieces := await reply.next_pieces(KEY_CHECK_S)) is not None:
            for piece in pieces:
                texts[piece.index].append(piece.text)
                wholes[piece.index].logprobs.extend(piece.logprobs)
                wholes[piece.index].calls.extend(piece.calls)
                wholes[piece.index].has_called = piece.has_called
                wholes[piece.index].finished = piece.finished
    finally:
        await reply.aclose()
    for whole in wholes:
        whole.text = "".join(texts[whole.index])
    return wholes
