"""One look at the engine for all consoles of this process, by one task of the event loop.

Four looks a second while a console watches, one a second (without the block map) otherwise, so
that a page opened later has the last minutes. Nothing goes over a channel layer: a console asks
for what is newer than its last tick, so a slow one gets fewer, merged updates and loses nothing.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

import orjson
from django.db import DatabaseError

from appliance.console.event_words import Worded
from appliance.console.host_load import HostLoad
from appliance.console.load_history import MinuteMaker, minute_save
from appliance.console.picture import Picture
from appliance.console.selectors import settings_version, users_by_owner
from appliance.console.trouble import TroubleWatch
from appliance.console.weights import WeightKeeper
from appliance.errors import EngineUnavailable
from appliance.serving.backend import Backend
from appliance.serving.booking import in_db_thread
from appliance.serving.gateway import get_backend
from appliance.serving.live_settings import live_state

logger = logging.getLogger(__name__)

LIVE_INTERVAL_S = 0.25
HISTORY_INTERVAL_S = 1.0

LoadUsers = Callable[[Collection[str]], Awaitable[Mapping[str, list[Any]]]]


class ConsoleFeed:
    """Used on one event loop only."""

    def __init__(
        self,
        backend: Callable[[], Backend] = get_backend,
        load_users: LoadUsers = users_by_owner,
        *,
        live_interval_s: float = LIVE_INTERVAL_S,
        history_interval_s: float = HISTORY_INTERVAL_S,
    ) -> None:
        self.picture = Picture()
        self.num_watching = 0
        # Unix seconds of the feed's zero.
        self.epoch = time.time()
        self._started = time.monotonic()
        self._get_backend = backend
        self._load_users = load_users
        self.live_interval_s = live_interval_s
        self.history_interval_s = history_interval_s
        self._backend: Backend | None = None
        self._last_event_id = 0
        self._task: asyncio.Task[None] | None = None
        self._look_now = asyncio.Event()
        self._looked = asyncio.Event()
        self._encoded: dict[int, bytes] = {}
        self._load = HostLoad()
        self._host: dict[str, Any] = {}
        self._minutes = MinuteMaker(self.epoch)
        self.weights = WeightKeeper()
        self.trouble = TroubleWatch()

    def start(self) -> None:
        """Begin to keep the history; does nothing when it runs."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="console-feed")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self.trouble.close()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Live looks while at least one console is inside."""
        self.start()
        self.num_watching += 1
        self._look_now.set()
        try:
            yield
        finally:
            self.num_watching -= 1

    async def newer_than(self, tick: int) -> int:
        """Wait until there is a look after `tick`; returns its tick."""
        while self.picture.tick <= tick:
            await self._looked.wait()
        return self.picture.tick

    def delta_since(self, base: int) -> bytes:
        """JSON members of an update without the braces; the same bytes for all in step."""
        found = self._encoded.get(base)
        if found is None:
            delta = self.picture.delta_since(base)
            delta["epoch"] = round(self.epoch, 2)
            found = self._encoded[base] = orjson.dumps(delta)[1:-1]
        return found

    def announce(self, worded: Worded) -> None:
        """Tell all consoles what an admin did, and look at once."""
        self.picture.announce(worded, time.time())
        self._look_now.set()

    async def look(self) -> None:
        """Take one look at the engine."""
        state, block_map, events = self._read()
        now = time.monotonic() - self._started
        if self.picture.samples.is_due(now):
            self._host = self._load.read(state)
        state = {**state, "host": self._host, "trouble": self.trouble.take(state, events)}
        self.picture.observe(state, block_map, events, now=now, epoch=self.epoch)
        unknown = self.picture.unknown_owners()
        if unknown:
            try:
                self.picture.put_users(await self._load_users(unknown))
            except DatabaseError:
                logger.warning("the console cannot read users' marks now", exc_info=True)
        self._encoded.clear()
        looked, self._looked = self._looked, asyncio.Event()
        looked.set()
        await self._keep_minute()
        if self._backend is not None:
            await self.weights.keep(self._backend)

    async def _keep_minute(self) -> None:
        sample = self.picture.new_sample
        ended = None if sample is None else self._minutes.take(sample)
        if ended is None:
            return
        try:
            await in_db_thread(minute_save, *ended)
        except DatabaseError:
            logger.warning("the plotted numbers of a minute are not kept", exc_info=True)

    def _read(self) -> tuple[Mapping[str, Any], Mapping[str, Any] | None, Any]:
        try:
            backend = self._get_backend()
        except EngineUnavailable as exc:
            return {"state": "unavailable", "error": exc.message, "requests": []}, None, ()
        if backend is not self._backend:
            self._backend, self._last_event_id = backend, 0
        events = backend.events_since(self._last_event_id)
        if events:
            self._last_event_id = int(events[-1]["event_id"])
        state = live_state(backend)
        state["settings_version"] = settings_version(state)
        block_map = backend.block_map() if self.num_watching else None
        return state, block_map, events

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            self._look_now.clear()
            try:
                await self.look()
            except Exception:
                # The feed's edge: one look that fails must not end it for every console.
                logger.exception("a look at the engine failed")
            interval = self.live_interval_s if self.num_watching else self.history_interval_s
            try:
                await asyncio.wait_for(self._look_now.wait(), began + interval - loop.time())
            except TimeoutError:
                continue
            # Asked for an early look: still no more of them than the live rate.
            await asyncio.sleep(began + self.live_interval_s - loop.time())


_feeds: WeakKeyDictionary[asyncio.AbstractEventLoop, ConsoleFeed] = WeakKeyDictionary()


def current_feed() -> ConsoleFeed:
    """The feed of the running event loop; there is one loop in a server."""
    loop = asyncio.get_running_loop()
    feed = _feeds.get(loop)
    if feed is None:
        feed = _feeds[loop] = ConsoleFeed()
    return feed
