"""Which names a server may answer to. A suffix under which strangers own names is none of them."""

import re

from appliance.errors import BadRequest
from appliance.exposure.policy import parse_address

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9])?"
_HOST_NAME = re.compile(rf"\.?{_LABEL}(?:\.{_LABEL})*", re.ASCII)
# Under a country's two letters these are registries, not teams: .co.uk, .com.au.
_REGISTRY_LABELS = frozenset(
    {"ac", "asn", "co", "com", "edu", "firm", "gen", "go", "gob", "gouv", "gov", "govt", "gv", "id"}
    | {"idv", "info", "ltd", "me", "mil", "name", "ne", "net", "nhs", "nic", "nom", "or", "org"}
    | {"plc", "pro", "res", "sch", "school", "web"}
)
# Where anybody gets a name within a minute, some of them for any address one likes.
_OPEN_TO_ALL = frozenset(
    {"azurewebsites.net", "cloudfront.net", "duckdns.org", "dyndns.org", "firebaseapp.com"}
    | {"fly.dev", "github.io", "gitlab.io", "herokuapp.com", "home.arpa", "localhost.run"}
    | {"localtest.me", "lvh.me", "netlify.app", "ngrok.app", "ngrok-free.app", "ngrok.io", "nip.io"}
    | {"no-ip.org", "onrender.com", "pages.dev", "sslip.io", "trycloudflare.com", "ts.net"}
    | {"vercel.app", "web.app", "workers.dev", "xip.io"}
)


def check_host_name(name: object) -> None:
    """Raises BadRequest unless `name` is a host name, `.domain` or an IP address; never `*`."""
    if isinstance(name, str) and len(name) <= 253:
        if _HOST_NAME.fullmatch(name):
            _check_suffix(name)
            return
        if name.startswith("[") and name.endswith("]") and parse_address(name[1:-1]):
            return
    raise BadRequest(
        f"{str(name)[:80]!r} cannot be a name of this server. Give a host name such as "
        "box.example, .team.example for all names below it, or an IP address (IPv6 in brackets); "
        "no http://, no port, no *.",
        param="allowed_hosts",
    )


def _check_suffix(name: str) -> None:
    if name.startswith(".") and _is_public(name[1:]):
        raise BadRequest(
            f"{name!r} takes in names that anybody can own: a stranger's page could speak to this "
            "server under one of them. Give the team's own domain, such as .team.example, or the "
            "whole name of this server.",
            param="allowed_hosts",
        )


def _is_public(suffix: str) -> bool:
    labels = suffix.split(".")
    if len(labels) == 1 or suffix in _OPEN_TO_ALL:
        return True
    return len(labels) == 2 and len(labels[1]) == 2 and labels[0] in _REGISTRY_LABELS
