"""Finds stop strings in text that comes in pieces, and holds back only what may belong to one.

Each stop string has a Knuth-Morris-Pratt automaton, so that a character costs the same whatever
came before, and the result does not depend on how the text was cut into pieces. No torch.
"""

from collections.abc import Sequence


class StopStrings:
    """State of one text. The stop string that is complete first ends it.

    Of two that are complete at the same character the longer one counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._fallbacks = [_fallback_table(stop) for stop in self._stops]
        # How many characters of each stop string the end of the text matches.
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Take new text; returns what can be shown now. After a stop: "" for ever."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        for at in range(len(self._held), len(buffer)):
            if stop := self._advance(buffer[at]):
                self.found = stop
                self._held = ""
                return buffer[: at + 1 - len(stop)]
        keep = len(buffer) - max(self._matched)
        self._held = buffer[keep:]
        return buffer[:keep]

    def finish(self) -> str:
        """The text has ended without a stop string: give out what was held back."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        complete = None
        for number, stop in enumerate(self._stops):
            matched = self._matched[number]
            while matched and stop[matched] != character:
                matched = self._fallbacks[number][matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                if complete is None or len(stop) > len(complete):
                    complete = stop
                matched = self._fallbacks[number][matched - 1]
            self._matched[number] = matched
        return complete


def _fallback_table(stop: str) -> list[int]:
    """Length of the longest proper prefix that is also a suffix, for each prefix of `stop`."""
    table = [0] * len(stop)
    matched = 0
    for at in range(1, len(stop)):
        while matched and stop[at] != stop[matched]:
            matched = table[matched - 1]
        if stop[at] == stop[matched]:
            matched += 1
        table[at] = matched
    return table
