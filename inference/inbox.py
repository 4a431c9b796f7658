"""The engine's door: what other threads hand in, and the limits that hold there. No torch.

Any thread may call every method but `take`. The lock is held for a few dictionary operations, never
while the engine computes. Invariant: what was let in is either taken by the engine thread or found
by it when the door is shut, so every accepted request meets its end.
"""

import contextlib
import math
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inference.errors import InferenceError, QueueFull, RequestRejected
from inference.request import FinishReason, Request
from inference.scheduling.settings import SchedulerSettings
from inference.streams import RequestStream

_LEAST_RETRY_S = 1.0
_MOST_RETRY_S = 60.0


@dataclass(frozen=True, slots=True)
class Add:
    request: Request
    stream: RequestStream


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str
    finish_reason: FinishReason
    detail: str | None


@dataclass(frozen=True, slots=True)
class Tune:
    changes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Drain:
    """Nothing new comes any more; what has not started ends now, and reads why."""

    why: str


Command = Add | Abort | Tune | Drain


class Inbox:
    def __init__(self, not_yet: InferenceError) -> None:
        """Shut with `not_yet` until it is opened."""
        # Set whenever the engine has a reason to look.
        self.wake = threading.Event()
        self.num_rejected = 0
        self._lock = threading.Lock()
        self._commands: deque[Command] = deque()
        # Request id -> labels, of all that were accepted and have not ended.
        self._live: dict[str, Mapping[str, str]] = {}
        # Accepted and not started yet, with the tokens of their prompts.
        self._num_waiting = 0
        self._waiting_tokens = 0
        self._not_yet = not_yet
        self._shut_by: InferenceError | None = not_yet

    def add(
        self,
        request: Request,
        stream: RequestStream,
        settings: SchedulerSettings,
        seconds_per_start: float | None,
    ) -> None:
        """Let a request in.

        Raises:
            QueueFull: with the time after which a new try makes sense.
            RequestRejected: its id is taken.
            InferenceError: what the door was shut with.
        """
        is_held = request.params.constraint is not None
        assert is_held == (request.grammar is not None), "compile the constraint first"
        with self._lock:
            if self._shut_by is not None:
                # A new one each time: an exception keeps the frames it was raised through.
                raise type(self._shut_by)(str(self._shut_by))
            if request.request_id in self._live:
                raise RequestRejected(f"A request with the id {request.request_id} is under way.")
            self._check_room(request, settings, seconds_per_start)
            self._live[request.request_id] = request.labels
            self._num_waiting += 1
            self._waiting_tokens += request.num_prompt_tokens
            self._commands.append(Add(request, stream))
        self.wake.set()

    def put(self, command: Abort | Tune | Drain) -> None:
        self._commands.append(command)
        self.wake.set()

    def take(self) -> list[Command]:
        """Everything handed in since the last call, in order.

        The engine thread only; another one too when it gives the engine up, and then each command
        goes to one of them.
        """
        commands: list[Command] = []
        with contextlib.suppress(IndexError):
            while True:
                commands.append(self._commands.popleft())
        return commands

    def open(self) -> None:
        """Let requests in, unless the door was shut for another reason meanwhile."""
        with self._lock:
            if self._shut_by is self._not_yet:
                self._shut_by = None

    def shut(self, error: InferenceError) -> None:
        """From here on every `add` raises `error`."""
        with self._lock:
            self._shut_by = error
        self.wake.set()

    def put_abort(self, command: Abort) -> bool:
        """Hand it in if its request was accepted and has not ended; False if not."""
        with self._lock:
            is_live = command.request_id in self._live
        if is_live:
            self.put(command)
        return is_live

    def live_labels(self) -> list[Mapping[str, str]]:
        """Labels of every accepted request that has not ended. O(those)."""
        with self._lock:
            return list(self._live.values())

    def on_started(self, request: Request) -> None:
        with self._lock:
            self._num_waiting -= 1
            self._waiting_tokens -= request.num_prompt_tokens

    def on_ended(self, request: Request) -> None:
        if request.first_scheduled_s is None:
            self.on_started(request)
        with self._lock:
            self._live.pop(request.request_id, None)

    def forget_all(self) -> None:
        """The engine has ended, and with it every request that was let in."""
        with self._lock:
            self._live.clear()

    def count_rejected(self) -> int:
        with self._lock:
            self.num_rejected += 1
            return self.num_rejected

    def _check_room(
        self, request: Request, settings: SchedulerSettings, seconds_per_start: float | None
    ) -> None:
        if self._num_waiting >= settings.max_waiting_requests:
            what = f"{self._num_waiting:,} requests wait already"
        elif (
            self._num_waiting
            and self._waiting_tokens + request.num_prompt_tokens > settings.max_waiting_tokens
        ):
            what = f"the requests that wait hold {self._waiting_tokens:,} tokens already"
        else:
            return
        # By then a tenth of the queue has started, and one place at least.
        retry_s = (seconds_per_start or _LEAST_RETRY_S) * max(1.0, self._num_waiting / 10)
        retry_s = min(max(retry_s, _LEAST_RETRY_S), _MOST_RETRY_S)
        # A whole number, so that text and header say the same.
        seconds = math.ceil(retry_s)
        raise QueueFull(
            f"The server is busy: {what}. Try again in {seconds} second{'s'[: seconds != 1]}.",
            retry_after_s=float(seconds),
        )
