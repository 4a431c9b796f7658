"""The chat socket: reads frames, hands them to `generations`, sends what comes back."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable
from typing import Any

import orjson
from autobahn.exception import Disconnected
from channels.generic.websocket import AsyncJsonWebsocketConsumer

from appliance.chat import protocol, selectors, services
from appliance.chat.allowance import FrameAllowance
from appliance.chat.generation import Generation
from appliance.chat.generations import generations
from appliance.chat.models import MessageState
from appliance.chat.refusals import refusal
from appliance.chat.sockets import sockets
from appliance.errors import ApplianceError, BadRequest
from appliance.serving.booking import STORAGE_FAULTS, in_db_thread, storage_unavailable


def _ask_of(message: protocol.GenerationAsk) -> services.Ask:
    if message["type"] == "generation.start":
        return services.Ask(kind="start", text=message["text"])
    if message["type"] == "generation.edit":
        text, message_id = message["text"], message["message_id"]
        return services.Ask(kind="edit", text=text, message_id=message_id)
    if message["type"] == "generation.continue":
        return services.Ask(kind="continue", message_id=message["message_id"])
    return services.Ask(kind="again")


class ChatConsumer(AsyncJsonWebsocketConsumer):
    """One a browser tab. Ends with its session; its answers do not end with it."""

    async def connect(self) -> None:
        user = self.scope["user"]
        session = self.scope["session"]
        if not user.is_authenticated or not session.session_key:
            await self.close(code=protocol.CLOSE_SIGNED_OUT)
            return
        self.user = user
        self.user_id: int = user.pk
        self.session_key: str = session.session_key
        self.loop = asyncio.get_running_loop()
        self.tasks: set[asyncio.Task[None]] = set()
        self.following: dict[str, asyncio.Task[None]] = {}
        self.allowance = FrameAllowance()
        await self.accept()
        sockets.add(self)
        generations.watch_sessions()

    async def disconnect(self, code: int) -> None:
        if hasattr(self, "tasks"):
            sockets.remove(self)
            for task in self.tasks:
                task.cancel()

    async def receive(
        self, text_data: str | None = None, bytes_data: bytes | None = None, **kwargs: Any
    ) -> None:
        if text_data is None:
            await self.close(code=protocol.CLOSE_BAD_DATA)
            return
        if len(text_data) > protocol.MAX_FRAME_CHARS:
            await self.close(code=protocol.CLOSE_TOO_BIG)
            return
        try:
            self.allowance.take()
            await self._handle(protocol.parse_client_message(orjson.loads(text_data)))
        except orjson.JSONDecodeError:
            await self._refuse(BadRequest("The message is not valid JSON."))
        except STORAGE_FAULTS as exc:
            await self._refuse(storage_unavailable(exc))
        except ApplianceError as exc:
            await self._refuse(exc)
            if self.allowance.is_abused:
                await self.close(code=protocol.CLOSE_TOO_MANY)

    async def _refuse(self, exc: ApplianceError) -> None:
        await self.send_json({"type": "error", "code": exc.code, "message": exc.message})

    async def _handle(self, message: protocol.ClientMessage) -> None:
        if message["type"] == "ping":
            await self.send_json({"type": "pong"})
        elif message["type"] == "generation.subscribe":
            await self._subscribe(message)
        elif message["type"] == "generation.stop":
            self._stop(message)
        else:
            await self._start(message)

    async def _start(self, message: protocol.GenerationAsk) -> None:
        client_id = message["client_id"]
        ask = _ask_of(message)
        try:
            # Sent again after a lost connection, when the answer has already ended?
            if generations.by_client_id(self.user_id, client_id) is None and (
                saved := await in_db_thread(selectors.sent_before, self.user_id, client_id)
            ):
                await self._send_all(saved)
                return
            about = (message["conversation_id"], ask, client_id, self.session_key)
            self._follow(generations.start(self.user, *about))
        except (ApplianceError, *STORAGE_FAULTS) as exc:
            told = exc if isinstance(exc, ApplianceError) else storage_unavailable(exc)
            await self.send_json(refusal(told, message["conversation_id"], ask, client_id))

    def _stop(self, message: protocol.GenerationStop) -> None:
        if (conversation_id := message["conversation_id"]) is not None:
            generations.stop(self.user_id, conversation_id)
        elif generation := generations.by_client_id(self.user_id, message["client_id"]):
            generation.stop(MessageState.STOPPED)

    async def _subscribe(self, message: protocol.GenerationSubscribe) -> None:
        conversation_id = message["conversation_id"]
        await in_db_thread(services.conversation_get, self.user_id, conversation_id)
        # The same one throughout: it can still be followed when it ends meanwhile.
        generation = generations.get(self.user_id, conversation_id)
        if "last_position" in message:
            what = (conversation_id, message["last_position"], generation is not None)
            await self._send_all(await in_db_thread(selectors.messages_saved, *what))
        if generation is None:
            idle = {"type": "generation.idle", "conversation_id": str(conversation_id)}
            await self.send_json(idle)
        else:
            self._follow(generation, message["last_seq"], message.get("message_id"))

    async def _send_all(self, messages: Iterable[protocol.ServerMessage]) -> None:
        for message in messages:
            await self.send_json(message)

    def _follow(
        self, generation: Generation, last_seq: int = 0, message_id: int | None = None
    ) -> None:
        """Send its events from here on; following again replaces the earlier following."""
        key = str(generation.conversation_id)
        if (earlier := self.following.pop(key, None)) is not None:
            earlier.cancel()
        self.following[key] = self._spawn(
            generation.follow(self.send_json, last_seq=last_seq, message_id=message_id)
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def post(self, message: protocol.ServerMessage) -> None:
        self._spawn(self.send_json(message))

    def sign_out(self) -> None:
        self._spawn(self.close(code=protocol.CLOSE_SIGNED_OUT))

    async def send_json(self, content: Any, close: bool = False) -> None:
        # A browser that left between two frames; its `disconnect` is on the way.
        with contextlib.suppress(Disconnected):
            await super().send_json(content, close)

    @classmethod
    async def encode_json(cls, content: Any) -> str:
        return orjson.dumps(content).decode()
