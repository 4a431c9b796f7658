"""The answers being written in this process, by owner and conversation: one a conversation.

They live here and not in a socket: a tab that goes away does not stop its answer, and any tab of
the owner can follow or stop it. Starting and following happen on the event loop; what may be
called from any thread says so.
"""

import asyncio
import logging
import uuid
from collections.abc import Collection

from django.db import DatabaseError

from appliance.accounts.models import User
from appliance.chat.generation import Generation
from appliance.chat.models import MessageState
from appliance.chat.services import Ask
from appliance.chat.sessions import sessions_ended
from appliance.chat.sockets import sockets
from appliance.errors import Conflict
from appliance.serving.booking import in_db_thread

logger = logging.getLogger(__name__)

SESSION_CHECK_S = 10.0
SHUTDOWN_TEXT = "The server was stopped while it was writing."
SIGNED_OUT_TEXT = "You signed out while it was writing."


class Generations:
    def __init__(self) -> None:
        self._running: dict[tuple[int, uuid.UUID], Generation] = {}
        self._by_client_id: dict[tuple[int, str], Generation] = {}
        # Also those that told their end and still read what is left of the quota.
        self._tasks: set[asyncio.Task[None]] = set()
        self._guard: asyncio.Task[None] | None = None

    # ---- event loop

    def start(
        self,
        owner: User,
        conversation_id: uuid.UUID | None,
        ask: Ask,
        client_id: str,
        session_key: str,
    ) -> Generation:
        """Begin an answer and return at once; what happens comes to those who follow it.

        The same `client_id` again returns the generation that it started. Raises Conflict while
        another answer is being written in this conversation.
        """
        if (known := self._by_client_id.get((owner.pk, client_id))) is not None:
            return known
        if conversation_id is not None and (owner.pk, conversation_id) in self._running:
            raise Conflict(
                "An answer is still being written in this chat. Wait for it to end, or stop it."
            )
        generation = Generation(owner, conversation_id, ask, client_id, session_key, self._forget)
        self._running[owner.pk, generation.conversation_id] = generation
        self._by_client_id[owner.pk, client_id] = generation
        task = asyncio.create_task(generation.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.watch_sessions()
        return generation

    def get(self, owner_id: int, conversation_id: uuid.UUID) -> Generation | None:
        return self._running.get((owner_id, conversation_id))

    def by_client_id(self, owner_id: int, client_id: str) -> Generation | None:
        return self._by_client_id.get((owner_id, client_id))

    def _forget(self, generation: Generation) -> None:
        self._running.pop((generation.owner.pk, generation.conversation_id), None)
        self._by_client_id.pop((generation.owner.pk, generation.client_id), None)

    async def shutdown(self) -> None:
        """End all answers as interrupted, with their text saved. The gateway takes no new ones."""
        if self._guard is not None:
            self._guard.cancel()
        await self.end_all(MessageState.INTERRUPTED, SHUTDOWN_TEXT)

    async def end_all(self, state: MessageState, error: str = "") -> None:
        """Every answer ends as `state` with its text saved; returns when nothing of any runs."""
        for generation in tuple(self._running.values()):
            generation.stop(state, error)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- any thread

    def running_ids(self, owner_id: int) -> Collection[uuid.UUID]:
        """Conversations of this owner in which an answer is being written."""
        return {conversation for owner, conversation in tuple(self._running) if owner == owner_id}

    def stop(self, owner_id: int, conversation_id: uuid.UUID) -> None:
        """Nothing happens when no answer of this owner is being written there."""
        generation = self._running.get((owner_id, conversation_id))
        if generation is not None:
            self._stop(generation, MessageState.STOPPED, "")

    def session_ended(self, session_key: str) -> None:
        """Close the sockets of this session and stop the answers it started."""
        for generation in tuple(self._running.values()):
            if generation.session_key == session_key:
                self._stop(generation, MessageState.STOPPED, SIGNED_OUT_TEXT)
        sockets.close_session(session_key)

    def _stop(self, generation: Generation, state: MessageState, error: str) -> None:
        if not generation.loop.is_closed():
            generation.loop.call_soon_threadsafe(generation.stop, state, error)

    # ---- sessions that ended without a word to this process

    def watch_sessions(self) -> None:
        """Keep checking the sessions of sockets and answers for as long as there are any."""
        if self._guard is None or self._guard.done():
            self._guard = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while self._sessions():
            await asyncio.sleep(SESSION_CHECK_S)
            try:
                await self.check_sessions()
            except DatabaseError as exc:
                logger.warning("sessions could not be checked: %s", exc)

    async def check_sessions(self) -> None:
        for _, session_key in await in_db_thread(sessions_ended, self._sessions()):
            self.session_ended(session_key)

    def _sessions(self) -> set[tuple[int, str]]:
        pairs = {(g.owner.pk, g.session_key) for g in self._running.values()}
        return pairs | {(socket.user_id, socket.session_key) for socket in sockets.all()}


generations = Generations()
