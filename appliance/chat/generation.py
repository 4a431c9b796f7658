"""One answer being written. Event loop only; `generations` holds those that run.

Whoever follows holds the number of characters it has and gets all after them as one, and nothing
of an answer goes over a channel layer. The database is written when an answer starts, when it
ends, and every few seconds between, never per token.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace

from django.db import DatabaseError

from appliance.accounts.models import User
from appliance.chat import services
from appliance.chat.instructions import instructions_in_force
from appliance.chat.models import MessageState
from appliance.chat.protocol import ServerMessage
from appliance.chat.refusals import refusal
from appliance.chat.selectors import conversation_data, message_data, quota_data
from appliance.chat.sockets import sockets
from appliance.chat.written import WrittenText
from appliance.errors import ApplianceError, EngineUnavailable, GenerationFailed
from appliance.serving.booking import STORAGE_FAULTS, in_db_thread, storage_unavailable
from appliance.serving.chat_settings import chat_setting
from appliance.serving.gateway import gateway_is_admitting
from appliance.serving.services import Generation as TokenSource
from appliance.serving.services import generation_open
from appliance.serving.types import (
    Caller,
    Delta,
    Finished,
    GenerationEvent,
    GenerationRequest,
    Queued,
    Reading,
    SamplingOptions,
)

logger = logging.getLogger(__name__)

# At the API's default temperature of 1 a small model rambles.
CHAT_OPTIONS = SamplingOptions(temperature=0.6, top_p=0.9)
# Pieces that come faster than this go out as one frame.
FRAME_GAP_S = 0.03
CHECKPOINT_S = 2.5
# Waits between tries to store an answer while the database does not answer.
SAVE_WAITS_S = (0.5, 2.0, 5.0)

BROKE_TEXT = "The model stopped working."
ENDED_TEXT = "An admin or the server ended this answer."
NOT_BEGUN_TEXT = "The server was stopped before this answer began. Ask again."
NOT_GONE_ON_TEXT = "The server was stopped before it went on."

Send = Callable[[ServerMessage], Awaitable[None]]


class Generation:
    """One answer, from its request to its saved end. `run` is its only task."""

    def __init__(
        self,
        owner: User,
        conversation_id: uuid.UUID | None,
        ask: services.Ask,
        client_id: str,
        session_key: str,
        on_end: Callable[["Generation"], None],
    ) -> None:
        self._on_end = on_end
        self.owner = owner
        self.is_new = conversation_id is None
        self.conversation_id = conversation_id or uuid.uuid4()
        self.ask = ask
        self.client_id = client_id
        self.session_key = session_key
        self.loop = asyncio.get_running_loop()
        # What the start saved; None while the door is being asked.
        self.started: services.StartedTurn | None = None
        self.written = WrittenText()
        # Characters that were there before; none unless it is gone on with.
        self._num_begun = 0
        self.completion_tokens = 0
        # Where it stands before the first text: queued or reading.
        self.status: ServerMessage | None = None
        self.final: ServerMessage | None = None
        self._source: TokenSource | None = None
        self._opening: asyncio.Future[TokenSource] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._checkpoint: asyncio.Task[None] | None = None
        self._finished: Finished | None = None
        self._ended_as: tuple[MessageState, str] | None = None
        self._began_s = self._checkpoint_s = time.monotonic()
        self._first_text_s: float | None = None
        self._followers: set[asyncio.Event] = set()

    # ---- the one task

    async def run(self) -> None:
        failure: BaseException | None = None
        try:
            await self._open()
            if self._ended_as is None:
                self._reader = asyncio.create_task(self._read())
                await asyncio.wait({self._reader})
                if not self._reader.cancelled():
                    failure = self._reader.exception()
        except ApplianceError as exc:
            failure = exc
        except STORAGE_FAULTS as exc:
            failure = storage_unavailable(exc)
        # Edge: the answer must end with an event whatever broke.
        except Exception as exc:
            failure = exc
        if failure is not None and not isinstance(failure, ApplianceError):
            logger.error("answer in %s failed", self.conversation_id, exc_info=failure)
        try:
            if self._source is not None:
                await self._source.aclose()
        finally:
            await self._end(failure)

    async def _open(self) -> None:
        """Ask at the door first; only what was admitted is saved."""
        known = None if self.is_new else self.conversation_id
        history = await in_db_thread(services.generation_history, self.owner.pk, known, self.ask)
        server_prompt = await instructions_in_force()
        if self._ended_as is not None:
            return
        caller = Caller(user_id=self.owner.pk, username=self.owner.username, source="chat")
        request = GenerationRequest(
            caller=caller,
            messages=history,
            server_prompt=server_prompt,
            options=replace(CHAT_OPTIONS, max_tokens=chat_setting("chat_max_tokens")),
            generation_class="interactive",
            continue_final_message=self.ask.kind == "continue",
        )
        self._opening = asyncio.ensure_future(generation_open(request, told=self._take_place))
        try:
            self._source = await self._opening
        except asyncio.CancelledError:
            # By `stop`, while it waited for its turn; else this very task is cancelled.
            if self._ended_as is None:
                raise
            return
        self.started = await in_db_thread(
            services.generation_start,
            self.owner,
            self.conversation_id,
            self.ask,
            client_id=self.client_id,
            is_new=self.is_new,
        )
        self.written = WrittenText(self.started.answer.content)
        self._num_begun = len(self.written)
        # The text lies in the database from here on.
        self.ask = replace(self.ask, text=None)
        self._tell_user(running=True)
        self._wake()

    def _take_place(self, event: Queued) -> None:
        self._take(event)
        self._wake()

    async def _read(self) -> None:
        assert self._source is not None, "reading starts after opening"
        async for event in self._source:
            self._take(event)
            self._wake()
            if self._finished is not None:
                return
        raise GenerationFailed(BROKE_TEXT)

    def _take(self, event: GenerationEvent) -> None:
        about = {"conversation_id": str(self.conversation_id), "client_id": self.client_id}
        if isinstance(event, Delta):
            self.completion_tokens = event.completion_tokens
            if event.text:
                self.written.add(event.text)
                now_s = time.monotonic()
                self._first_text_s = self._first_text_s or now_s
                if now_s - self._checkpoint_s > CHECKPOINT_S:
                    self._checkpoint_s = now_s
                    self._start_checkpoint()
        elif isinstance(event, Queued):
            self.status = {  # type: ignore[assignment]
                "type": "generation.queued",
                "ahead": event.ahead,
                "estimated_wait_s": event.estimated_wait_s,
                **about,
            }
        elif isinstance(event, Reading):
            self.status = {  # type: ignore[assignment]
                "type": "generation.reading",
                "done_tokens": event.done_tokens,
                "prompt_tokens": event.prompt_tokens,
                **about,
            }
        else:
            self._finished = event

    def _start_checkpoint(self) -> None:
        assert self.started is not None, "text comes after the start was saved"
        if self._checkpoint is None or self._checkpoint.done():
            self._checkpoint = asyncio.create_task(
                self._save_checkpoint(self.started.answer.pk, str(self.written))
            )

    async def _save_checkpoint(self, message_id: int, text: str) -> None:
        try:
            await in_db_thread(services.generation_checkpoint, message_id, text)
        except DatabaseError as exc:
            logger.warning("the text so far of answer %d was not stored: %s", message_id, exc)

    # ---- the end

    def stop(self, state: MessageState, error: str = "") -> None:
        """End it as `state` with the text so far; its slot is free at once. Event loop only."""
        if self._ended_as is None and self.final is None:
            self._ended_as = (state, error)
            for task in (self._opening, self._reader):
                if task is not None:
                    task.cancel()

    async def _end(self, failure: BaseException | None) -> None:
        if self.started is None:
            known = None if self.is_new else self.conversation_id
            self.final = refusal(failure, known, self.ask, self.client_id)
        else:
            if self._checkpoint is not None:
                await self._checkpoint
            ending, answer = self._ending(failure), self.started.answer
            if self.ask.kind == "continue":
                ending = services.ending_continued(answer, ending)
            saved = await self._save(answer.pk, ending)
            if saved is None:
                for name in services.Ending.__slots__:
                    setattr(answer, name, getattr(ending, name))
            self.final = {"type": "generation.finished", "message": message_data(saved or answer)}
        self._on_end(self)
        self._wake()
        if self.started is not None:
            self._tell_user(running=False)
            try:
                quota = await in_db_thread(quota_data, self.owner)
            except DatabaseError as exc:
                logger.warning("the quota of user %d could not be read: %s", self.owner.pk, exc)
            else:
                sockets.send_to_user(self.owner.pk, {"type": "quota.updated", "quota": quota})

    async def _save(self, message_id: int, ending: services.Ending) -> services.Message | None:
        for wait_s in (*SAVE_WAITS_S, None):
            try:
                return await in_db_thread(services.generation_finish, message_id, ending)
            except DatabaseError as exc:
                logger.warning("answer %d was not stored yet: %s", message_id, exc)
                in_haste = ending.state == MessageState.INTERRUPTED
                if wait_s is None or in_haste:
                    break
                await asyncio.sleep(wait_s)
        return None

    def _ending(self, failure: BaseException | None) -> services.Ending:
        state, error, reason = MessageState.ERROR, BROKE_TEXT, "error"
        finished = self._finished
        if finished is not None and finished.finish_reason in ("stop", "length"):
            state, error, reason = MessageState.COMPLETE, "", finished.finish_reason
        elif self._ended_as is not None:
            (state, error), reason = self._ended_as, "abort"
        elif finished is not None and finished.finish_reason == "abort":
            state, error, reason = MessageState.INTERRUPTED, finished.error or ENDED_TEXT, "abort"
        elif finished is not None and _is_not_begun(finished):
            # The words stay in the chat: by then the server is no longer stopping.
            not_begun = NOT_GONE_ON_TEXT if self._num_begun else NOT_BEGUN_TEXT
            state, error = MessageState.INTERRUPTED, not_begun
        elif finished is not None:
            error = finished.error or BROKE_TEXT
        elif isinstance(failure, ApplianceError):
            error = failure.message
        assert self._source is not None, "an answer that started was opened"
        counts: Finished | TokenSource = finished or self._source
        first_s = self._first_text_s
        measured = first_s - self._began_s if first_s is not None else None
        return services.Ending(
            state=state,
            content=str(self.written),
            finish_reason=reason,
            error=error,
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            completion_tokens=counts.completion_tokens,
            ttft_s=finished.ttft_s if finished else measured,
            duration_s=finished.duration_s if finished else time.monotonic() - self._began_s,
        )

    # ---- those who follow

    def _wake(self) -> None:
        for follower in self._followers:
            follower.set()

    def _tell_user(self, *, running: bool) -> None:
        assert self.started is not None, "told after the start was saved"
        conversation = conversation_data(self.started.conversation)
        sockets.send_to_user(
            self.owner.pk,
            {"type": "conversation.updated", "conversation": conversation, "running": running},
        )

    async def follow(self, send: Send, *, last_seq: int = 0, message_id: int | None = None) -> None:
        """Send what is missing after `last_seq` of answer `message_id`, then all that comes."""
        changed = asyncio.Event()
        self._followers.add(changed)
        told: ServerMessage | None = None
        introduced = False
        seq = 0
        try:
            while True:
                changed.clear()
                if self.started is not None and not introduced:
                    introduced = True
                    if message_id == self.started.answer.pk and last_seq <= len(self.written):
                        seq = last_seq
                    await self._introduce(self.started, send)
                if self.status is not told and len(self.written) == self._num_begun:
                    told = self.status
                    if told is not None:
                        await send(told)
                sent_text = introduced and seq < len(self.written)
                if sent_text:
                    seq = await self._send_text(send, seq)
                if self.final is not None and (not introduced or seq == len(self.written)):
                    await send(self.final)
                    return
                if sent_text:
                    await asyncio.sleep(FRAME_GAP_S)
                await changed.wait()
        finally:
            self._followers.discard(changed)

    async def _introduce(self, started: services.StartedTurn, send: Send) -> None:
        if self.is_new:
            conversation = conversation_data(started.conversation)
            await send(
                {
                    "type": "conversation.created",
                    "conversation": conversation,
                    "client_id": self.client_id,
                }
            )
        follows = started.follows
        for message in (started.user_message, started.answer):
            if message is not None:
                data = message_data(message)
                await send({"type": "message.saved", "message": data, "follows": follows})
                follows = message.position

    async def _send_text(self, send: Send, seq: int) -> int:
        assert self.started is not None, "text comes after the start was saved"
        upto = len(self.written)
        await send(
            {
                "type": "generation.delta",
                "conversation_id": str(self.conversation_id),
                "message_id": self.started.answer.pk,
                "from_seq": seq,
                "seq": upto,
                "text": self.written.after(seq),
                "completion_tokens": self.completion_tokens,
            }
        )
        return upto


def _is_not_begun(finished: Finished) -> bool:
    """The server stopped before anything of it was computed."""
    return finished.error_code == EngineUnavailable.code and not gateway_is_admitting()
