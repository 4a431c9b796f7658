"""Is the process alive, and is it ready to serve? Cheap, without log-in, without details.

A busy server is ready. Not ready: the model loads, is changed, or its engine is loaded again,
hangs or is dead; the server stops; the embedded database's disk is full; the database or Redis
(where one is set) does not answer; work runs and no step has ended for a minute.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.core.cache import cache
from django.db import DatabaseError, InterfaceError, connection
from redis.exceptions import RedisError

from appliance.errors import EngineUnavailable
from appliance.serving.booking import in_db_thread
from appliance.serving.gateway import gateway_is_admitting, get_backend

# The longest step of a large model on a slow machine ends well before this.
STALL_S = 60.0
# Below this a booking may not find room.
LEAST_FREE_BYTES = 1024 * 1024
_LOADING_STATES = ("loading", "rebuilding", "swapping")
_ANSWER_WAIT_S = 2.0
# Probes that come faster than this share one look.
_ANSWER_FRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class Readiness:
    # ready, or why not: absent, loading, rebuilding, swapping, hung, dead, stopping, stalled, disk,
    # database, redis.
    status: str
    # Load progress in [0, 1] and what is being done, while a model is loaded.
    progress: float | None = None
    doing: str = ""

    @property
    def is_ready(self) -> bool:
        return self.status == "ready"


class StepWatch:
    """Notices that work runs and the step number stands still. Looks only when it is asked."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step: int | None = None
        self._since_s = 0.0

    def is_stalled(self, step: int, has_work: bool) -> bool:
        now = self._clock()
        if not has_work or step != self._step:
            self._step = step if has_work else None
            self._since_s = now
        return now - self._since_s > STALL_S


class Probe:
    """Whether something answers, asked at most once a second and waited for briefly."""

    def __init__(
        self,
        ask: Callable[[], Coroutine[Any, Any, bool]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._asked: asyncio.Future[bool] | None = None
        self._asked_s = 0.0

    async def is_usable(self) -> bool:
        asked = self._asked
        fresh = asked is not None and (
            not asked.done() or self._clock() - self._asked_s < _ANSWER_FRESH_S
        )
        if asked is None or not fresh or asked.get_loop() is not asyncio.get_running_loop():
            self._asked_s = self._clock()
            self._asked = asked = asyncio.ensure_future(self._ask())
        done, _ = await asyncio.wait([asked], timeout=_ANSWER_WAIT_S)
        return bool(done) and asked.result()


async def ask_database() -> bool:
    try:
        await in_db_thread(_query)
    except (DatabaseError, InterfaceError):
        return False
    return True


def _query() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")


def free_bytes() -> int:
    """What the disk of the data folder still takes."""
    return shutil.disk_usage(settings.DATA_DIR).free


def has_room() -> bool:
    """Whether the embedded database can grow. Reads work on a full disk: no query tells."""
    return connection.vendor != "sqlite" or free_bytes() >= LEAST_FREE_BYTES


async def ask_redis() -> bool:
    """True where none is set. Not in a database thread: a Redis that hangs would hold it."""
    if not settings.REDIS_URL:
        return True
    try:
        await asyncio.to_thread(cache.get, "readiness")
    except RedisError:
        return False
    return True


_watch = StepWatch()
_database = Probe(ask_database)
_redis = Probe(ask_redis)


def can_act() -> bool:
    """False when only a restart helps: the engine is dead."""
    try:
        return get_backend().state()["state"] != "dead"
    except EngineUnavailable:
        return True


async def readiness() -> Readiness:
    try:
        state = get_backend().state()
    except EngineUnavailable:
        return Readiness("absent")
    name = state["state"]
    if not gateway_is_admitting() or name == "draining":
        return Readiness("stopping")
    if name in _LOADING_STATES:
        progress, doing = state.get("progress") or (0.0, "")
        return Readiness(name, progress, doing)
    if name == "hung":
        return Readiness("hung")
    if name != "ready":
        return Readiness("dead")
    if _watch.is_stalled(state.get("step", 0), bool(state["running"] or state["waiting"])):
        return Readiness("stalled")
    if not has_room():
        return Readiness("disk")
    if not await _database.is_usable():
        return Readiness("database")
    if not await _redis.is_usable():
        return Readiness("redis")
    return Readiness("ready")
