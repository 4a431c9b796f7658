"""A capacity test's own requests: they come by the hundred and are no member's news."""

from collections.abc import Mapping
from math import inf
from typing import Any

from appliance.console.event_words import Worded, event_words

# As its requests are labelled; the app of the test lies above this one.
SOURCE = "capacity"
# After this much silence the next request is of another test.
QUIET_S = 60.0


def is_of_test(told: Mapping[str, Any]) -> bool:
    """Whether an event, or a request as the engine lists it, comes from a capacity test."""
    return (told.get("labels") or {}).get("source") == SOURCE


class CapacityTraffic:
    """One line when a test begins to send instead of a line for each of its requests."""

    def __init__(self) -> None:
        self._last_at = -inf
        self._failed_told = False

    def observe(self, event: Mapping[str, Any]) -> Worded | None:
        """What is worth a line in an event of a test; its time is unix seconds."""
        at = float(event["at"])
        is_new, self._last_at = at - self._last_at > QUIET_S, at
        if is_new:
            self._failed_told = False
        if event["kind"] == "failed" and not self._failed_told:
            # Somebody has to mend it.
            self._failed_told = True
            return event_words(event)
        if not is_new:
            return None
        who = event["labels"].get("username") or "somebody"
        text = f"A capacity test of {who} sends requests. They are not told here one by one."
        return Worded("", "info", text)
