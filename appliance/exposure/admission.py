"""The checks on one ASGI scope, before routes, sessions and keys: path, Host, peer, Origin.

`admit()` returns a copy of the scope that the rest of the product can believe: `client` is the
caller's own address, `scheme` the one the caller used, and no header that only a proxy may set is
left in it.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from django.http.request import split_domain_port, validate_host

from appliance.errors import BadRequest, NotAllowed
from appliance.exposure.policy import Address, ExposurePolicy, contains, parse_address

# A probe asks by IP address, so these two do without a known name.
HEALTH_PATHS = frozenset({"/healthz", "/readyz"})

_PROXY_HEADERS = frozenset(
    {
        b"forwarded",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-port",
        b"x-forwarded-proto",
        b"x-forwarded-server",
        b"x-real-ip",
    }
)
_DEFAULT_PORTS = {"http": 80, "https": 443}

Scope = Mapping[str, Any]
Headers = Sequence[tuple[bytes, bytes]]


def admit(scope: Scope, policy: ExposurePolicy) -> dict[str, Any]:
    """The scope as the product may see it.

    Raises:
        BadRequest: no single well-formed Host header with a declared name, or an odd path.
        NotAllowed: the caller's network, or the socket's Origin, is not allowed.
    """
    headers: Headers = scope.get("headers") or []
    is_socket = scope["type"] == "websocket"
    path = scope.get("path", "")
    if not path.startswith("/"):
        raise BadRequest("The request line must name a path that starts with '/'.")
    peer = _peer(scope)
    trusted = peer is not None and contains(policy.proxies, peer)
    client = _client(peer, headers, policy) if trusted else peer
    if not policy.admits(client):
        raise NotAllowed("Your network address may not use this server. Ask its admin.")
    scheme = _scheme(scope, headers, trusted)
    if path in HEALTH_PATHS and not is_socket:
        host = next((name for name in policy.hosts if not name.startswith(".")), "localhost")
    else:
        host = _declared_host(headers, policy)
    if is_socket:
        _check_origin(headers, scheme, host)
    kept = [(name, value) for name, value in headers if _keep(name)]
    changed = {
        **scope,
        "headers": [*kept, (b"host", host.encode("ascii"))],
        "scheme": {"http": "ws", "https": "wss"}[scheme] if is_socket else scheme,
    }
    if trusted and client != peer:
        changed["client"] = [str(client), 0]
    return changed


def values_of(headers: Headers, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key.lower() == name]


def _keep(name: bytes) -> bool:
    lower = name.lower()
    return lower not in _PROXY_HEADERS and lower != b"host"


def _peer(scope: Scope) -> Address | None:
    client = scope.get("client")
    return parse_address(client[0]) if client else None


def _client(peer: Address | None, headers: Headers, policy: ExposurePolicy) -> Address | None:
    """First hop from the right that is no proxy of ours; the peer if a hop before it is garbage."""
    hops = ",".join(values_of(headers, b"x-forwarded-for")).split(",")
    found = peer
    for hop in reversed(hops):
        if not hop.strip():
            continue
        address = _hop_address(hop.strip())
        if address is None:
            return peer
        found = address
        if not contains(policy.proxies, address):
            break
    return found


def _hop_address(hop: str) -> Address | None:
    """`1.2.3.4`, `1.2.3.4:5`, `::1`, `[::1]` and `[::1]:5`."""
    if hop.startswith("["):
        return parse_address(hop[1:].partition("]")[0])
    if hop.count(":") == 1:
        hop = hop.partition(":")[0]
    return parse_address(hop)


def _scheme(scope: Scope, headers: Headers, trusted: bool) -> str:
    """`http` or `https`, also for a socket."""
    if trusted:
        told = ",".join(values_of(headers, b"x-forwarded-proto")).rpartition(",")[2].strip().lower()
        if told in _DEFAULT_PORTS:
            return told
    return "https" if scope.get("scheme") in ("https", "wss") else "http"


def _declared_host(headers: Headers, policy: ExposurePolicy) -> str:
    found = values_of(headers, b"host")
    if len(found) != 1:
        raise BadRequest(f"The request has {len(found)} Host headers; exactly one is needed.")
    host = found[0].strip().lower()
    domain, _port = split_domain_port(host)
    if not domain or not validate_host(domain, policy.hosts):
        raise BadRequest(
            "This server does not answer to the name that the call was sent to (its Host header). "
            "Use one of its own names, or ask an admin to add this one under Names on the "
            "console's exposure page."
        )
    return host


def _check_origin(headers: Headers, scheme: str, host: str) -> None:
    """A browser's socket carries the cookie whatever page opened it, so the page must be ours."""
    found = values_of(headers, b"origin")
    if len(found) != 1:
        raise NotAllowed("A socket needs the Origin header of a page of this server.")
    if _origin_key(found[0].strip().lower()) != _origin_key(f"{scheme}://{host}"):
        raise NotAllowed("A page of another origin may not open a socket here.")


def _origin_key(origin: str) -> tuple[str, str, int] | str:
    """Scheme, host and port, default ports filled in; an unlike text for what is no origin."""
    try:
        parts = urlsplit(origin)
        port = parts.port
    except ValueError:
        return "malformed"
    extra = parts.path or parts.query or parts.fragment or "@" in parts.netloc
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or extra:
        return "malformed"
    return parts.scheme, parts.hostname, port or _DEFAULT_PORTS[parts.scheme]
