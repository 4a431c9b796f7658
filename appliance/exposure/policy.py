"""What the exposure checks go by: one immutable policy for the whole process, replaced at once.

`serve` installs the policy that the exposure settings in the database say; without one (tests, a
plain ASGI server) it follows the boot settings: the allowed hosts, any network, no proxy.
"""

import ipaddress
import time
from collections.abc import Iterable
from dataclasses import dataclass

from django.conf import settings

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Who may call when the server listens beyond this machine and no network was named.
PRIVATE_NETWORKS: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "127.0.0.0/8",
        "::1/128",
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "169.254.0.0/16",
        "fc00::/7",
        "fe80::/10",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposurePolicy:
    # Names as in Django's ALLOWED_HOSTS, without "*".
    hosts: tuple[str, ...]
    # None lets any peer in.
    networks: tuple[Network, ...] | None
    # Peers whose X-Forwarded-For and X-Forwarded-Proto are believed.
    proxies: tuple[Network, ...]
    max_body_bytes: int

    def admits(self, address: Address | None) -> bool:
        """Whether a caller at `address` may speak to the server; None is an unknown address."""
        if self.networks is None:
            return True
        return address is not None and contains(self.networks, address)


def contains(networks: Iterable[Network], address: Address) -> bool:
    return any(address in network for network in networks)


def parse_address(text: str) -> Address | None:
    """An IP address without zone; IPv4 written inside IPv6 becomes IPv4. None if it is not one."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


_installed: ExposurePolicy | None = None
# While a change is on trial: when it ends (monotonic seconds) and what then holds again.
_trial: tuple[float, ExposurePolicy] | None = None
_bound_host: str | None = None


def policy_install(
    policy: ExposurePolicy, *, for_s: float | None = None, then: ExposurePolicy | None = None
) -> None:
    """Check every further request and socket by `policy`; after `for_s` seconds by `then`."""
    global _installed, _trial
    _installed = policy
    _trial = None
    if for_s is not None and then is not None:
        _trial = (time.monotonic() + for_s, then)
    settings.ALLOWED_HOSTS = list(policy.hosts)


def policy_remove() -> None:
    global _installed, _trial, _bound_host
    _installed = _trial = _bound_host = None


def policy_current() -> ExposurePolicy:
    if _trial is not None and time.monotonic() >= _trial[0]:
        policy_install(_trial[1])
    if _installed is not None:
        return _installed
    return ExposurePolicy(
        hosts=tuple(name for name in settings.ALLOWED_HOSTS if name != "*"),
        networks=None,
        proxies=(),
        max_body_bytes=settings.DATA_UPLOAD_MAX_MEMORY_SIZE,
    )


def bound_to(host: str) -> None:
    """Note the address that this process listens on; settings of the next start may say another."""
    global _bound_host
    _bound_host = host


def bound_host() -> str | None:
    """None when this process was not told where it listens."""
    return _bound_host
