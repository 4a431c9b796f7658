"""Tells once of each request that has to wait for memory, with the numbers."""

from collections.abc import Iterable, Mapping
from typing import Any

from appliance.console.capacity_traffic import is_of_test
from appliance.console.event_words import Worded, memory_wait_words

# A shorter wait is no news.
TOLD_AFTER_S = 2.0


class MemoryWaits:
    def __init__(self) -> None:
        self._told: set[str] = set()

    def observe(self, requests: Iterable[Mapping[str, Any]]) -> list[Worded]:
        """What is new, given all requests that the engine names now."""
        waiting: set[str] = set()
        news = []
        for info in requests:
            wait = info.get("wait") or {}
            if wait.get("why") != "memory" or info["age_s"] < TOLD_AFTER_S or is_of_test(info):
                continue
            request_id = str(info["request_id"])
            waiting.add(request_id)
            if request_id not in self._told:
                who = (info.get("labels") or {}).get("username") or "someone"
                news.append(memory_wait_words(who, wait))
        self._told = waiting
        return news
