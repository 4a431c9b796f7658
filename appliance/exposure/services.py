"""Read, check and change the exposure settings. Blocking: call from worker threads."""

import copy
import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings as boot
from django.db import transaction
from django.http.request import split_domain_port, validate_host
from django.utils import timezone

from appliance.accounts.acts import act_done
from appliance.accounts.models import User
from appliance.errors import BadRequest, Conflict
from appliance.exposure.host_names import check_host_name
from appliance.exposure.models import ExposureSettings, ExposureTrial
from appliance.exposure.policy import (
    PRIVATE_NETWORKS,
    ExposurePolicy,
    Network,
    bound_host,
    bound_to,
    parse_address,
    policy_install,
)

LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
CHANGEABLE = ("bind_host", "port", "allowed_hosts", "allowed_networks", "trusted_proxies")

_ONLY_ROW = 1
_MAX_ENTRIES = 100


def exposure_settings() -> ExposureSettings:
    """The one row; the first time it takes the address and port of the environment.

    A trial that is over is taken back first.
    """
    over = ExposureTrial.objects.filter(pk=_ONLY_ROW, ends_at__lte=timezone.now()).first()
    if over is not None:
        _take_back(by=None, at=over.ends_at)
    found, _ = ExposureSettings.objects.get_or_create(
        pk=_ONLY_ROW,
        defaults={"bind_host": boot.APPLIANCE_HOST, "port": boot.APPLIANCE_PORT},
    )
    return found


def exposure_install(row: ExposureSettings) -> ExposurePolicy:
    """Go by `row` from now on, as a server that listens on its address; goes on with a trial."""
    bound_to(row.bind_host)
    policy = exposure_policy(row)
    trial = ExposureTrial.objects.filter(pk=_ONLY_ROW).first()
    if trial is None:
        policy_install(policy)
    else:
        earlier = copy.copy(row)
        for name, value in trial.before.items():
            setattr(earlier, name, value)
        policy_install(policy, for_s=_seconds_left(trial), then=exposure_policy(earlier))
    return policy


def exposure_change(
    by: User | None,
    *,
    client_address: str | None = None,
    client_host: str | None = None,
    trial_s: float | None = None,
    **changes: Any,
) -> ExposureSettings:
    """Check and save `changes` to the fields in `CHANGEABLE`.

    Names, networks and proxies count at once; address and port from the next start on. A change
    that would shut out a caller at `client_address` or with the Host `client_host` is refused.
    With `trial_s`, one that may shut others out, or this one in a way that cannot be foreseen, is
    taken back after that many seconds unless it is kept.

    Raises:
        BadRequest: a value is not allowed, or the result is not safe to open; nothing was changed.
        Conflict: another change is on trial.
    """
    unknown = sorted(set(changes) - set(CHANGEABLE))
    if unknown:
        raise BadRequest(f"{unknown[0]} is no exposure setting; there are {', '.join(CHANGEABLE)}.")
    exposure_settings()
    with transaction.atomic():
        row = ExposureSettings.objects.select_for_update().get(pk=_ONLY_ROW)
        if ExposureTrial.objects.exists():
            raise Conflict("A change is on trial. Keep it or take it back first.")
        earlier, was = exposure_policy(row), copy.copy(row)
        for name, value in changes.items():
            setattr(row, name, value)
        row.allowed_hosts = [
            name.strip().lower() if isinstance(name, str) else name
            for name in _entries(row, "allowed_hosts")
        ]
        exposure_check(row)
        policy = exposure_policy(row)
        _check_not_shut_out(policy, client_address, client_host)
        before, after = _differences(was, row)
        if not after:
            return row
        row.changed_by = by
        row.save()
        on_trial = trial_s is not None and _may_shut_out(earlier, policy)
        if on_trial:
            ends_at = timezone.now() + timedelta(seconds=trial_s)
            ExposureTrial.objects.create(
                pk=_ONLY_ROW, before=before, after=after, by=by, ends_at=ends_at
            )
        action = "exposure.try" if on_trial else "exposure.change"
        act_done(by, action, ", ".join(after), before=before, after=after)
    policy_install(policy, for_s=trial_s if on_trial else None, then=earlier)
    return row


def _differences(
    was: ExposureSettings, row: ExposureSettings
) -> tuple[dict[str, Any], dict[str, Any]]:
    names = [name for name in CHANGEABLE if getattr(was, name) != getattr(row, name)]
    return {n: getattr(was, n) for n in names}, {n: getattr(row, n) for n in names}


def _check_not_shut_out(
    policy: ExposurePolicy, client_address: str | None, client_host: str | None
) -> None:
    if client_address is not None and not policy.admits(parse_address(client_address)):
        raise BadRequest(
            f"These networks would shut you out: your address is {client_address}. Add it.",
            param="allowed_networks",
        )
    domain = split_domain_port(client_host.lower())[0] if client_host else None
    if domain is not None and not validate_host(domain, policy.hosts):
        raise BadRequest(
            f"These names would shut you out: you came by {domain}. Add it.", param="allowed_hosts"
        )


def _may_shut_out(earlier: ExposurePolicy, policy: ExposurePolicy) -> bool:
    """Whether a caller who came in before may be refused now."""
    if earlier.proxies != policy.proxies or not set(earlier.hosts) <= set(policy.hosts):
        return True
    if policy.networks is None:
        return False
    return earlier.networks is None or not set(earlier.networks) <= set(policy.networks)


# ---- a change on trial


def exposure_trial() -> ExposureTrial | None:
    """The change that waits to be kept; None when there is none or its time is over."""
    exposure_settings()
    return ExposureTrial.objects.select_related("by").filter(pk=_ONLY_ROW).first()


def exposure_trial_keep(by: User | None) -> None:
    """Raises Conflict when nothing is on trial (any more)."""
    row = exposure_settings()
    with transaction.atomic():
        trial = _trial_locked()
        ExposureTrial.objects.filter(pk=trial.pk).delete()
        act_done(by, "exposure.keep", ", ".join(trial.after), **_change_of(trial))
    policy_install(exposure_policy(row))


def exposure_trial_take_back(by: User | None) -> None:
    """Raises Conflict when nothing is on trial (any more)."""
    exposure_settings()
    _take_back(by)


def _take_back(by: User | None, at: datetime | None = None) -> None:
    with transaction.atomic():
        row = ExposureSettings.objects.select_for_update().get(pk=_ONLY_ROW)
        trial = _trial_locked()
        for name, value in trial.before.items():
            setattr(row, name, value)
        row.changed_by = by
        row.save()
        ExposureTrial.objects.filter(pk=trial.pk).delete()
        swapped = {"before": trial.after, "after": trial.before}
        act_done(by, "exposure.take_back", ", ".join(trial.after), at=at, **swapped)
    policy_install(exposure_policy(row))


def _trial_locked() -> ExposureTrial:
    trial = ExposureTrial.objects.select_for_update().filter(pk=_ONLY_ROW).first()
    if trial is None:
        raise Conflict("Nothing is on trial any more: the change was kept or taken back.")
    return trial


def _change_of(trial: ExposureTrial) -> dict[str, Any]:
    return {"before": trial.before, "after": trial.after}


def _seconds_left(trial: ExposureTrial) -> float:
    return max(0.0, (trial.ends_at - timezone.now()).total_seconds())


# ---- checks


def exposure_policy(row: ExposureSettings) -> ExposurePolicy:
    """What the checks on every request go by. Raises BadRequest for entries that are malformed.

    Until the next start the process listens where it listens now, whatever `row` says.
    """
    listens_on = bound_host() or row.bind_host
    named = _networks(row, "allowed_networks")
    if named:
        networks: tuple[Network, ...] | None = named
    else:
        networks = None if is_loopback(listens_on) else PRIVATE_NETWORKS
    hosts = (
        *LOCAL_HOSTS,
        *_own_host(listens_on),
        *_own_host(row.bind_host),
        *_boot_hosts(),
        *row.allowed_hosts,
    )
    return ExposurePolicy(
        hosts=tuple(dict.fromkeys(hosts)),
        networks=networks,
        proxies=_networks(row, "trusted_proxies"),
        max_body_bytes=boot.DATA_UPLOAD_MAX_MEMORY_SIZE,
    )


def exposure_check(row: ExposureSettings) -> None:
    """Raises BadRequest when a field is malformed or the server would be open unsafely."""
    if isinstance(row.port, bool) or not isinstance(row.port, int) or not 1 <= row.port <= 65535:
        raise BadRequest(
            f"{row.port!r} is no port. Give a whole number from 1 to 65535.", param="port"
        )
    if not _is_bind_host(row.bind_host):
        raise BadRequest(
            f"{str(row.bind_host)[:80]!r} is no address to listen on. Give 127.0.0.1 for this "
            "machine only, 0.0.0.0 or :: for all its addresses, or one IP address of it.",
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
            f"{where}, but no name is declared under which people reach it. Save one under Names "
            "on the console's exposure page first, or set APPLIANCE_ALLOWED_HOSTS.",
            param="allowed_hosts",
        )


def is_loopback(host: str) -> bool:
    address = parse_address(host.strip("[]"))
    return host.lower() == "localhost" if address is None else address.is_loopback


def _boot_hosts() -> list[str]:
    """Names that the operator declared in the environment; they always count."""
    return [name.lower() for name in boot.APPLIANCE_ALLOWED_HOSTS]


def _is_bind_host(host: object) -> bool:
    if not isinstance(host, str):
        return False
    return host.lower() == "localhost" or parse_address(host.strip("[]")) is not None


def _own_host(bind_host: str) -> tuple[str, ...]:
    """The Host header of callers who type the address; none for a bind to all addresses."""
    bare = bind_host.strip("[]")
    bound = parse_address(bare)
    if bound is None or bound.is_unspecified:
        return ()
    return (f"[{bare}]" if ":" in bare else bare,)


def _entries(row: ExposureSettings, field: str) -> Sequence[Any]:
    value = getattr(row, field)
    if not isinstance(value, list):
        raise BadRequest(f"{field} must be a list of texts.", param=field)
    if len(value) > _MAX_ENTRIES:
        raise BadRequest(
            f"There are {len(value)} entries; at most {_MAX_ENTRIES} are allowed.", param=field
        )
    return value


def _networks(row: ExposureSettings, field: str) -> tuple[Network, ...]:
    return tuple(_network(text, field) for text in _entries(row, field))


def _network(text: object, field: str) -> Network:
    told = str(text).strip() if isinstance(text, str) else ""
    with suppress(ValueError):
        return ipaddress.ip_network(told)
    hint = ""
    with suppress(ValueError):
        # An address inside its network: 10.20.4.1/16.
        hint = f" Its network is {ipaddress.ip_network(told, strict=False)}."
    raise BadRequest(
        f"{str(text)[:80]!r} is no network. Give one such as 10.20.0.0/16, or an address such as "
        f"10.20.4.1.{hint}",
        param=field,
    )
