"""The appliance's own server during a test: what it holds, who waits, how many slots it has."""

import asyncio
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil

from appliance.capacity.load import LoadFailed
from appliance.console.host_load import HostLoad

SOURCE = "capacity"
_MISSED_LOOKS = 5
_STATE_WORDS = {
    "loading": "The server is loading its model. Try again when it is ready.",
    "draining": "The server was stopped.",
    "rebuilding": "The server's engine failed and is loaded again. Try again when it is ready.",
    "swapping": "The server changes its model. Try again when it is ready.",
    "hung": "The server's engine does not answer. Try again when it is ready.",
    "dead": "The server's engine failed. Start the server again.",
}


class ServerProbe:
    """Reads `/api/engine` with the test's key, which needs the scope admin."""

    def __init__(self, client: aiohttp.ClientSession, base_url: str, pid: int | None) -> None:
        parts = urlsplit(base_url)
        self._url = f"{parts.scheme}://{parts.netloc}/api/engine"
        self._client, self._pid = client, pid
        self._load = HostLoad()
        self._missed = 0
        self.members_waiting = 0
        self.members_running = 0
        self.longest_wait_s = 0.0
        # Open unless members wait; the load asks before each request.
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.state: dict[str, Any] = {}
        self.begin_level()

    def begin_level(self) -> None:
        self.kv_share: float | None = None
        self.memory_bytes: int | None = None
        self._preemptions_before = self._preemptions()

    async def look(self) -> None:
        """Take the newest state. Raises LoadFailed when the server stops or is gone."""
        try:
            self.state = await self._ask("GET")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
            self._missed += 1
            if self._missed >= _MISSED_LOOKS or not self.state:
                raise LoadFailed(f"The server does not answer any more: {exc}.") from exc
            return
        self._missed = 0
        if self.state.get("state") not in ("ready", None):
            raise LoadFailed(_STATE_WORDS.get(self.state["state"], "The server is not ready."))
        self._see_members()
        self._see_memory()

    async def set_slots(self, number: Any) -> None:
        self.state = await self._ask("PATCH", {"slots": number})

    @property
    def slots(self) -> dict[str, Any]:
        return self.state.get("slots") or {}

    @property
    def effective_slots(self) -> int | None:
        return self.slots.get("effective")

    @property
    def preemptions(self) -> int | None:
        now, before = self._preemptions(), self._preemptions_before
        return None if now is None or before is None else now - before

    @property
    def context_tokens(self) -> int | None:
        return (self.state.get("model") or {}).get("context_tokens")

    def _preemptions(self) -> int | None:
        return (self.state.get("totals") or {}).get("preemptions")

    async def _ask(self, method: str, change: dict[str, Any] | None = None) -> dict[str, Any]:
        async with self._client.request(
            method, self._url, json=change, allow_redirects=False
        ) as response:
            if response.status != 200:
                raise ValueError(f"/api/engine answered {response.status}")
            found: dict[str, Any] = await response.json()
            return found

    def _see_members(self) -> None:
        others = [
            request
            for request in self.state.get("requests") or ()
            if (request.get("labels") or {}).get("source") != SOURCE
        ]
        waits = [request["age_s"] for request in others if request["state"] == "waiting"]
        self.members_waiting = len(waits)
        self.members_running = len(others) - len(waits)
        self.longest_wait_s = max(waits, default=0.0)

    def _see_memory(self) -> None:
        kv = self.state.get("kv") or {}
        if kv.get("blocks_total"):
            share = kv["blocks_used"] / kv["blocks_total"]
            self.kv_share = max(self.kv_share or 0.0, share)
        used = self._memory_in_use()
        if used is not None:
            self.memory_bytes = max(self.memory_bytes or 0, used)

    def _memory_in_use(self) -> int | None:
        """Of the GPU where one serves, else of the server's process."""
        if self._pid is None:
            return None
        on_gpu = self._load.read(self.state)["gpu_memory_bytes"]
        if on_gpu is not None:
            return int(on_gpu)
        try:
            return int(psutil.Process(self._pid).memory_info().rss)
        except psutil.Error:
            return None
