"""A capacity test's own requests: they come by the hundred and are no member's news."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from appliance.console.event_words import Worded, event_words

# As its requests are labelled; the app of the test lies above this one.
SOURCE = "capacity"
# Tests follow one another; a line for one of so long ago does no harm.
_KEPT_TESTS = 8


def is_of_test(told: Mapping[str, Any]) -> bool:
    """Whether an event, or a request as the engine lists it, comes from a capacity test."""
    return (told.get("labels") or {}).get("source") == SOURCE


class CapacityTraffic:
    """One line when a test begins to send instead of one for each of its requests."""

    def __init__(self) -> None:
        # Every test has a key of its own: how long one is silent, and when its answers are
        # stopped, says nothing.
        self._told = deque[str](maxlen=_KEPT_TESTS)
        self._failure_told = deque[str](maxlen=_KEPT_TESTS)

    def observe(self, event: Mapping[str, Any]) -> list[Worded]:
        """What is worth a line in an event of a test."""
        labels, found = event["labels"], list[Worded]()
        test = str(labels.get("key_id"))
        if test not in self._told:
            self._told.append(test)
            who = labels.get("username") or "somebody"
            text = f"A capacity test of {who} sends requests. They are not told here one by one."
            found.append(Worded("", "info", text))
        if event["kind"] == "failed" and test not in self._failure_told:
            # Somebody has to mend it; the rest fail alike.
            self._failure_told.append(test)
            if words := event_words(event):
                found.append(words)
        return found
