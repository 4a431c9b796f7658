"""Database work of the event loop: in threads of its own, and bookings that do not give up.

A booking that the database refuses (gone, locked, disk full) is tried again until it succeeds:
tokens are never free because the database was away. While it is away nothing new can be reserved,
so what waits here is bounded by what was running.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from channels.db import database_sync_to_async
from django.db import InterfaceError, OperationalError

from appliance.brief_log import OnceAMinute
from appliance.errors import StorageUnavailable

logger = logging.getLogger(__name__)
_trouble = OnceAMinute(logger, logging.ERROR)

# The database is away, locked or has no room; a request that meets it is not at fault.
STORAGE_FAULTS = (OperationalError, InterfaceError)

P = ParamSpec("P")
T = TypeVar("T")

_RETRY_DELAYS_S = (0.2, 1.0, 5.0, 15.0)
# Not the request's own thread: that one ends with the request, a booking may come later.
_threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="booking")
# The loop holds tasks weakly; a booking must live until it is done.
_bookings: set["asyncio.Future[Any]"] = set()


async def in_db_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run blocking database work; a fresh or checked connection, closed as the settings say."""
    run = database_sync_to_async(work, thread_sensitive=False, executor=_threads)
    return await run(*args, **kwargs)


def storage_unavailable(exc: Exception) -> StorageUnavailable:
    """What a caller is told of one of STORAGE_FAULTS; the log says it once a minute."""
    _trouble.log("requests are refused, as the database does not take them: %s", exc)
    return StorageUnavailable()


def book(work: Callable[..., Any], *args: Any) -> "asyncio.Future[None]":
    """Run `work(*args)` until the database takes it. It must be safe to repeat."""
    return keep(asyncio.ensure_future(_book(work, args)))


def keep(task: "asyncio.Future[T]") -> "asyncio.Future[T]":
    """Let `task` live until it is done, and let `bookings_wait` wait for it."""
    _bookings.add(task)
    task.add_done_callback(_bookings.discard)
    return task


async def _book(work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    tries = 0
    while True:
        try:
            await in_db_thread(work, *args)
        except STORAGE_FAULTS as exc:
            delay_s = _RETRY_DELAYS_S[min(tries, len(_RETRY_DELAYS_S) - 1)]
            tries += 1
            logger.warning("booking waits %.1f s for the database: %s", delay_s, exc)
            await asyncio.sleep(delay_s)
        else:
            return


async def bookings_wait(timeout_s: float) -> int:
    """Wait for what is being booked; returns how many are still not."""
    if not _bookings:
        return 0
    _, waiting = await asyncio.wait(set(_bookings), timeout=timeout_s)
    return len(waiting)
