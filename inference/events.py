"""What happened in the engine, for people: a bounded ring that any thread may read. No torch."""

import threading
import time
from collections import deque
from collections.abc import Mapping

from inference.outputs import EngineEvent
from inference.request import Request

_RING_SIZE = 1000


class EventRing:
    def __init__(self, size: int = _RING_SIZE) -> None:
        self._lock = threading.Lock()
        self._events: deque[EngineEvent] = deque(maxlen=size)
        self._last_id = 0

    def add(
        self, kind: str, request: Request | None = None, **data: int | float | str
    ) -> EngineEvent:
        labels: Mapping[str, str] = {} if request is None else dict(request.labels)
        request_id = None if request is None else request.request_id
        with self._lock:
            self._last_id += 1
            event = EngineEvent(self._last_id, kind, time.time(), request_id, labels, data)
            self._events.append(event)
            return event

    def since(self, event_id: int) -> list[EngineEvent]:
        """Events with a higher id, oldest first; the oldest may have left the ring."""
        found = []
        with self._lock:
            for event in reversed(self._events):
                if event.event_id <= event_id:
                    break
                found.append(event)
        found.reverse()
        return found
