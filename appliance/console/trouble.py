"""What an admin has to know of the server and can do about it: what is wrong, why, what to do.

The feed looks; open consoles and the other pages for admins show the worst. Event loop only, but
`trouble_now`, which any thread may ask.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from django.conf import settings
from django.db import DatabaseError

from appliance.brief_log import OnceAMinute
from appliance.serving.booking import in_db_thread
from appliance.serving.health import free_bytes, readiness
from appliance.serving.worker_watch import worker_is_missing

logger = logging.getLogger(__name__)
_log = OnceAMinute(logger, logging.ERROR)

LOOK_EVERY_S = 2.0
# Below this a model does not fit any more, and a busy team's database fills it in days.
LOW_FREE_BYTES = 256 * 2**20
# How long a failure that mended itself is worth a line over the page.
MENDED_SHOWN_S = 900.0
_MIB = 2**20


class Trouble(NamedTuple):
    """`key` is stable; `tone` is danger, warn or info; `icon` one of static/icons.svg."""

    key: str
    tone: str
    icon: str
    what: str
    why: str


class TroubleWatch:
    """Looks at what the engine's state does not tell, and remembers failures that are over."""

    def __init__(self) -> None:
        self._outside: list[Trouble] = []
        self._mended: tuple[float, Trouble] | None = None
        self._looked_s = -LOOK_EVERY_S
        self._task: asyncio.Task[None] | None = None

    def take(
        self, state: Mapping[str, Any], events: Iterable[Mapping[str, Any]]
    ) -> Sequence[Trouble]:
        """All that is wrong now, the worst first. Starts a look at the rest, but does not wait."""
        global _now
        now_s = time.monotonic()
        for event in events:
            if event["kind"] in ("engine_failed", "engine_hung"):
                self._mended = (now_s, _mended_words(event.get("data") or {}))
        if now_s - self._looked_s >= LOOK_EVERY_S and (self._task is None or self._task.done()):
            self._looked_s = now_s
            self._task = asyncio.create_task(self.look(), name="trouble-look")
            self._task.add_done_callback(_complain)
        found = [*_of_engine(state), *self._outside]
        if self._mended and state.get("state") == "ready":
            since_s, mended = self._mended
            if now_s - since_s < MENDED_SHOWN_S:
                found.append(mended)
        if notice := (state.get("model") or {}).get("notice"):
            found.append(Trouble("slow", "warn", "warn", "Slower than it could be.", notice))
        _now = tuple(sorted(found, key=_worth))
        return _now

    async def look(self) -> None:
        """Ask the database, Redis, the disk and for the worker."""
        found = []
        status = (await readiness()).status
        if status in _OUTSIDE:
            found.append(_OUTSIDE[status])
        elif free_bytes() < LOW_FREE_BYTES:
            found.append(_low_disk())
        if status not in ("disk", "database"):
            try:
                if await in_db_thread(worker_is_missing):
                    found.append(_NO_WORKER)
            except DatabaseError:
                logger.debug("cannot look for the worker now", exc_info=True)
        self._outside = found

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def _complain(look: "asyncio.Task[None]") -> None:
    """A look that fails tells what the last one told; the next one may be better."""
    if not look.cancelled() and (fault := look.exception()):
        _log.log("the console cannot look for trouble now: %r", fault)


_now: tuple[Trouble, ...] = ()


def trouble_now() -> Trouble | None:
    """The worst that the last look found; None when all is well or nothing looks."""
    return _now[0] if _now else None


def trouble_forget() -> None:
    global _now
    _now = ()


def _worth(trouble: Trouble) -> int:
    order = ("dead", "hung", "absent", "draining")
    if trouble.key in order:
        return order.index(trouble.key)
    return len(order) + ("danger", "warn", "info").index(trouble.tone)


def _of_engine(state: Mapping[str, Any]) -> list[Trouble]:
    name, error = state.get("state"), state.get("error")
    if name == "dead":
        why = (
            f"{error or 'The server log has the reason.'} Chats are safe; no new answers until a "
            "model serves again: load one on the Models page, or start the server again."
        )
        return [Trouble("dead", "danger", "error", "The model stopped working.", why)]
    if name == "hung":
        why = (
            f"{error or 'A step does not end.'} Running answers were ended. It is loaded again if "
            "its step returns; otherwise the server ends and has to be started again."
        )
        return [Trouble("hung", "danger", "error", "The engine does not answer.", why)]
    if name == "unavailable":
        return [Trouble("absent", "danger", "plug", "No model is served here.", error or "")]
    if name == "draining":
        left = state.get("running") or 0
        why = f"Running answers may finish ({left} left); new ones are refused."
        return [Trouble("draining", "warn", "out", "The server is stopping.", why)]
    return []


def _mended_words(data: Mapping[str, Any]) -> Trouble:
    cause = str(data.get("cause") or "the log has the reason").rstrip(".")
    why = (
        f"It failed: {cause}. Answers of that moment ended with an error, new ones are written. "
        "If it happens again, the server's log says where."
    )
    return Trouble("mended", "warn", "retry", "The engine was loaded again.", why)


def _low_disk() -> Trouble:
    why = (
        f"{free_bytes() // _MIB} MiB are left for {settings.DATA_DIR}. When it is full, new "
        "answers are refused. Delete models that nobody uses, or make room."
    )
    return Trouble("low_disk", "warn", "warn", "The disk is nearly full.", why)


_NO_WORKER = Trouble(
    "worker",
    "warn",
    "plug",
    "The background worker does not run.",
    "Capacity tests wait, usage is not added up, and old rows stay. It starts with the server, "
    "whose log says why it ended: start the server again. If it runs with --no-worker, start "
    "one beside it: manage.py worker.",
)
_OUTSIDE = {
    "disk": Trouble(
        "disk",
        "danger",
        "error",
        "The disk is full.",
        f"New answers are refused, running ones go on. Make room on the disk of "
        f"{settings.DATA_DIR}: delete models that nobody uses, old logs, or other files. It goes "
        "on by itself.",
    ),
    "database": Trouble(
        "database",
        "danger",
        "plug",
        "The database does not answer.",
        "New answers are refused, running ones go on and are booked later. See that it runs and "
        "can be reached (DATABASE_URL). It goes on by itself.",
    ),
    "redis": Trouble(
        "redis",
        "danger",
        "plug",
        "Redis does not answer.",
        "Sign-in and background work wait for it. See that it runs and can be reached "
        "(REDIS_URL). It goes on by itself.",
    ),
    "stalled": Trouble(
        "stalled",
        "danger",
        "error",
        "The engine makes no progress.",
        "Requests run and no step has ended for a minute. Kill the newest request; if nothing "
        "moves then, start the server again.",
    ),
}
