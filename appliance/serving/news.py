"""One reader's wake-up: many sources may ring, the reader's task is woken once. Event loop only."""

import asyncio


class News:
    """`ring` from any source; one reader waits.

    It knows nobody: a source that keeps a reader's bell does not keep the reader.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_rung = False
        self._wake: asyncio.Future[None] | None = None
        self._wake_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def ring(self) -> None:
        self._is_rung = True
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Until it rang since the last wait, or the time is up."""
        if not self._is_rung:
            self._wake = self._loop.create_future()
            if timeout_s is not None:
                self._set_timer(self._loop.time() + timeout_s)
            try:
                await self._wake
            finally:
                self._wake = None
        self._is_rung = False

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self, wake_at: float) -> None:
        self._wake_at = wake_at
        # A timer a token would cost more than the token: one that runs early is set again.
        if self._timer is not None:
            if self._timer.when() <= wake_at:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(wake_at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._loop.time() >= self._wake_at:
            self.ring()
        elif self._wake is not None:
            self._timer = self._loop.call_at(self._wake_at, self._on_timer)
