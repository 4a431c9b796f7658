"""Troubles that come with every request, and shall not fill the log."""

import logging
import math
import time

WINDOW_S = 60.0


class OnceAMinute:
    """One line a minute, however often it happens."""

    def __init__(self, logger: logging.Logger, level: int) -> None:
        self._logger = logger
        self._level = level
        self._next_s = -math.inf

    def log(self, message: str, *args: object) -> None:
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + WINDOW_S
            self._logger.log(self._level, message, *args)
