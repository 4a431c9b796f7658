"""How many frames a socket may send: a bucket that refills with time."""

import time

from appliance.errors import RateLimited

FRAMES_PER_S = 10.0
FRAMES_BURST = 40.0
# Frames over the limit, without a pause between, after which the socket is not worth keeping.
REFUSED_MOST = 200


class FrameAllowance:
    def __init__(self) -> None:
        self._left = FRAMES_BURST
        self._counted_s = time.monotonic()
        self._num_refused = 0

    @property
    def is_abused(self) -> bool:
        return self._num_refused > REFUSED_MOST

    def take(self) -> None:
        """Count one frame. Raises RateLimited when none is left."""
        now_s = time.monotonic()
        self._left = min(FRAMES_BURST, self._left + (now_s - self._counted_s) * FRAMES_PER_S)
        self._counted_s = now_s
        if self._left < 1:
            self._num_refused += 1
            raise RateLimited("Too many messages in a short time. Wait a few seconds.")
        if self._left > FRAMES_BURST / 2:
            self._num_refused = 0
        self._left -= 1
