"""The networks a key may be used from: written as people do, checked with the caller's address."""

import ipaddress
import re
from collections.abc import Sequence

from appliance.errors import BadRequest

MAX_NETWORKS = 50


def networks_parse(text: str) -> list[str]:
    """`10.0.0.0/8, 192.0.2.7` as networks in their plain form, in order and once each.

    Raises:
        BadRequest: names the first entry that is no network.
    """
    found: dict[str, None] = {}
    for entry in re.split(r"[\s,;]+", text.strip()):
        if entry:
            found[_network(entry)] = None
    if len(found) > MAX_NETWORKS:
        raise BadRequest(
            f"{len(found)} networks are too many; {MAX_NETWORKS} are allowed.", param="networks"
        )
    return list(found)


def _network(entry: str) -> str:
    try:
        return str(ipaddress.ip_network(entry))
    except ValueError:
        pass
    try:
        # A host address before the slash: most likely a slip, and certainly not what was meant.
        loose = ipaddress.ip_network(entry, strict=False)
    except ValueError:
        raise BadRequest(
            f"{entry[:60]!r} is no network. Write an address like 192.0.2.7 or a network like "
            "10.0.0.0/8.",
            param="networks",
        ) from None
    raise BadRequest(f"{entry[:60]!r} has bits after its network: write {loose}.", param="networks")


def networks_hold(networks: Sequence[str], address: str | None) -> bool:
    """Whether `address` is in one of them; an unknown address is in none."""
    try:
        found = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found in ipaddress.ip_network(network) for network in networks)
