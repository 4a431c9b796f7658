"""Read, check and change the exposure settings. Blocking: call from worker threads."""

import ipaddress
import re
from collections.abc import Sequence
from typing import Any

from django.conf import settings as boot
from django.db import transaction

from appliance.accounts.models import User
from appliance.errors import BadRequest
from appliance.exposure.models import ExposureSettings
from appliance.exposure.policy import (
    PRIVATE_NETWORKS,
    ExposurePolicy,
    Network,
    parse_address,
    policy_install,
)

LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
CHANGEABLE = ("bind_host", "port", "allowed_hosts", "allowed_networks", "trusted_proxies")

_ONLY_ROW = 1
_MAX_ENTRIES = 100
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9])?"
_HOST_NAME = re.compile(rf"\.?{_LABEL}(?:\.{_LABEL})*", re.ASCII)


def exposure_settings() -> ExposureSettings:
    """The one row; the first time it takes the address and port of the environment."""
    found, _ = ExposureSettings.objects.get_or_create(
        pk=_ONLY_ROW,
        defaults={"bind_host": boot.APPLIANCE_HOST, "port": boot.APPLIANCE_PORT},
    )
    return found


def exposure_change(
    by: User | None, *, client_address: str | None = None, **changes: Any
) -> ExposureSettings:
    """Check and save `changes` to the fields in `CHANGEABLE`.

    Names, networks and proxies count at once; address and port from the next start on. With
    `client_address`, a change that would shut that caller out is refused.

    Raises:
        BadRequest: a value is not allowed, or the result is not safe to open; nothing was changed.
    """
    unknown = sorted(set(changes) - set(CHANGEABLE))
    if unknown:
        raise BadRequest(f"{unknown[0]} is no exposure setting; there are {', '.join(CHANGEABLE)}.")
    with transaction.atomic():
        exposure_settings()
        row = ExposureSettings.objects.select_for_update().get(pk=_ONLY_ROW)
        for name, value in changes.items():
            setattr(row, name, value)
        row.allowed_hosts = [
            name.strip().lower() if isinstance(name, str) else name
            for name in _entries(row, "allowed_hosts")
        ]
        exposure_check(row)
        policy = exposure_policy(row)
        if client_address is not None and not policy.admits(parse_address(client_address)):
            raise BadRequest(
                f"These networks would shut you out: your address is {client_address}. Add it.",
                param="allowed_networks",
            )
        row.changed_by = by
        row.save()
    policy_install(policy)
    return row


def exposure_policy(row: ExposureSettings) -> ExposurePolicy:
    """What the checks on every request go by. Raises BadRequest for entries that are malformed."""
    named = _networks(row, "allowed_networks")
    if named:
        networks: tuple[Network, ...] | None = named
    else:
        networks = None if is_loopback(row.bind_host) else PRIVATE_NETWORKS
    bound = parse_address(row.bind_host.strip("[]"))
    own = () if bound is None or bound.is_unspecified else (_as_host(row.bind_host),)
    hosts = (*LOCAL_HOSTS, *own, *_boot_hosts(), *row.allowed_hosts)
    return ExposurePolicy(
        hosts=tuple(dict.fromkeys(hosts)),
        networks=networks,
        proxies=_networks(row, "trusted_proxies"),
        max_body_bytes=boot.DATA_UPLOAD_MAX_MEMORY_SIZE,
    )


def exposure_check(row: ExposureSettings) -> None:
    """Raises BadRequest when a field is malformed or the server would be open unsafely."""
    if isinstance(row.port, bool) or not isinstance(row.port, int) or not 1 <= row.port <= 65535:
        raise BadRequest(f"port is {row.port!r}; 1 to 65535 is allowed.", param="port")
    if not _is_bind_host(row.bind_host):
        raise BadRequest(
            f"bind_host is {row.bind_host!r}; an IP address of this machine, 0.0.0.0, :: or "
            "localhost is allowed.",
            param="bind_host",
        )
    for name in _entries(row, "allowed_hosts"):
        check_host_name(name)
    exposure_policy(row)
    if not is_loopback(row.bind_host):
        _check_open_bind(row)


def _check_open_bind(row: ExposureSettings) -> None:
    """Beyond this machine only with somebody who can sign in, and with names to be reached by."""
    where = f"The server would listen beyond this machine ({row.bind_host})"
    if not User.objects.filter(is_active=True, is_staff=True).exists():
        raise BadRequest(
            f"{where}, but there is no admin yet, so whoever comes first could take it over. Start "
            "it on 127.0.0.1 and finish the set-up, or run manage.py createsuperuser first.",
            param="bind_host",
        )
    if not [*row.allowed_hosts, *_boot_hosts()]:
        raise BadRequest(
            f"{where}, but no name is declared under which people reach it. Set "
            "APPLIANCE_ALLOWED_HOSTS, or name it on the exposure page first.",
            param="allowed_hosts",
        )


def is_loopback(host: str) -> bool:
    address = parse_address(host.strip("[]"))
    return host.lower() == "localhost" if address is None else address.is_loopback


def check_host_name(name: object) -> None:
    """Raises BadRequest unless `name` is a host name, `.domain` or an IP address; never `*`."""
    if isinstance(name, str) and len(name) <= 253:
        if _HOST_NAME.fullmatch(name):
            return
        if name.startswith("[") and name.endswith("]") and parse_address(name[1:-1]):
            return
    raise BadRequest(
        f"allowed_hosts has {str(name)[:80]!r}; a host name, .domain for all names below it, or an "
        "IP address (IPv6 in brackets) is allowed, without port, and no *.",
        param="allowed_hosts",
    )


def _boot_hosts() -> list[str]:
    """Names that the operator declared in the environment; they always count."""
    return [name.lower() for name in boot.APPLIANCE_ALLOWED_HOSTS]


def _is_bind_host(host: object) -> bool:
    if not isinstance(host, str):
        return False
    return host.lower() == "localhost" or parse_address(host.strip("[]")) is not None


def _as_host(bind_host: str) -> str:
    bare = bind_host.strip("[]")
    return f"[{bare}]" if ":" in bare else bare


def _entries(row: ExposureSettings, field: str) -> Sequence[Any]:
    value = getattr(row, field)
    if not isinstance(value, list) or len(value) > _MAX_ENTRIES:
        raise BadRequest(f"{field} must be a list of at most {_MAX_ENTRIES} entries.", param=field)
    return value


def _networks(row: ExposureSettings, field: str) -> tuple[Network, ...]:
    found = []
    for text in _entries(row, field):
        try:
            if not isinstance(text, str):
                raise ValueError("no text")
            found.append(ipaddress.ip_network(text.strip()))
        except ValueError as exc:
            raise BadRequest(
                f"{field} has {str(text)[:80]!r}; an address or a network such as 10.20.0.0/16 is "
                f"allowed ({exc}).",
                param=field,
            ) from exc
    return tuple(found)
