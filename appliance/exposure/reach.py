"""What is true now: the sockets this process listens on, and what answers at this machine's own
addresses. Nothing here reads the settings.

A call to an address of this machine comes from that same address, so an address inside a network
shows how the server treats a caller of that network. Blocking.
"""

import http.client
import ipaddress
import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil

from appliance.exposure.policy import Address, parse_address

PROBE_TIMEOUT_S = 1.5
# What is asked of each part, and the answers that show it let the caller in as far as its own door.
PROBES = {
    "chat": ("/login/", (200,)),
    "api": ("/v1/models", (401,)),
    "console": ("/console/", (302,)),
    "metrics": ("/metrics", (200, 401)),
}
_MAX_OWN_ADDRESSES = 8


@dataclass(frozen=True, slots=True, order=True)
class Listening:
    address: str
    port: int

    @property
    def is_unspecified(self) -> bool:
        return ipaddress.ip_address(self.address).is_unspecified

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback

    def takes(self, address: Address) -> bool:
        """Whether a call to `address` of this machine ends here."""
        own = ipaddress.ip_address(self.address)
        if own.is_unspecified:
            # Opened to take IPv4 callers too: see serving.start.listen.
            return own.version == 6 or address.version == 4
        return own == address


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: `status` None is no connection."""

    status: int | None
    duration_s: float
    body: bytes = b""


def listening_sockets() -> list[Listening]:
    """The TCP sockets that this process listens on, as the operating system tells."""
    found = {
        Listening(connection.laddr.ip, connection.laddr.port)
        for connection in psutil.Process().net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    return sorted(found)


def own_addresses() -> list[Address]:
    """This machine's addresses beyond itself; no link-local ones, which need an interface."""
    found = []
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            address = parse_address(entry.address)
            if address and not address.is_loopback and not address.is_link_local:
                found.append(address)
    return found[:_MAX_OWN_ADDRESSES]


def ask(address: Address, port: int, path: str) -> Answer:
    """GET `path` there, by the name localhost, which the server always knows."""
    begun = time.monotonic()
    connection = http.client.HTTPConnection(str(address), port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"Host": "localhost", "User-Agent": "reach-test"})
        answer = connection.getresponse()
        return Answer(answer.status, time.monotonic() - begun, answer.read(4096))
    except (OSError, http.client.HTTPException):
        return Answer(None, time.monotonic() - begun)
    finally:
        connection.close()


def ask_all(address: Address, port: int) -> dict[str, Answer]:
    """Part -> answer, all parts at once."""
    with ThreadPoolExecutor(len(PROBES)) as pool:
        asked = {part: pool.submit(ask, address, port, path) for part, (path, _) in PROBES.items()}
        return {part: future.result() for part, future in asked.items()}


def is_let_in(part: str, answer: Answer) -> bool:
    """Whether the caller came past the network's rule, as far as the part's own door."""
    if answer.status is None or b"network address may not use" in answer.body:
        return False
    return answer.status in PROBES[part][1]


def first_inside(networks: Iterable[object], addresses: Iterable[Address]) -> Address | None:
    """The first of `addresses` that lies in one of `networks`."""
    return next((a for a in addresses if any(a in network for network in networks)), None)
