"""Every route of the product, asked by a visitor: no content but from the few that are public."""

import re
from collections.abc import Iterator

import pytest
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

from appliance.accounts.models import User

pytestmark = pytest.mark.django_db

# Liveness and readiness say nothing but their state; the others are the way in.
PUBLIC = {"healthz", "readyz", "account_login", "set_up", "invite"}

SAMPLES = {
    "int": "1",
    "str": "x",
    "slug": "x",
    "path": "x/y",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


def routes(
    patterns: list[URLPattern | URLResolver], before: str = "/"
) -> Iterator[tuple[str, str]]:
    for pattern in patterns:
        path = before + sample(pattern.pattern)
        if isinstance(pattern, URLResolver):
            yield from routes(pattern.url_patterns, path)
        else:
            yield pattern.name or "", path


def sample(pattern: object) -> str:
    """A path that the pattern matches; fails on a form that is not known here."""
    route = getattr(pattern, "_route", None)
    if route is not None:
        return re.sub(r"<(?:(\w+):)?\w+>", lambda m: SAMPLES[m[1] or "str"], route)
    text = pattern._regex.removeprefix("^").removesuffix("$")
    text = re.sub(r"\(\?P<\w+>\[0-9\]\{\d+,\d+\}\)", "1", text)
    text = re.sub(r"\(\?P<\w+>(\w[\w-]*)(\|[\w-]+)*\)", r"\1", text)
    text = text.replace("(/.*)?", "/x")
    assert pattern.regex.match(text), f"no sample for {pattern._regex}"
    return text


ROUTES = sorted(set(routes(get_resolver().url_patterns)))


def test_the_walk_finds_the_routes_of_all_apps() -> None:
    paths = {path for _, path in ROUTES}
    for known in ("/login/", "/account/", "/console/users/", "/v1/models", "/healthz"):
        assert known in paths


@pytest.mark.parametrize(("name", "path"), [r for r in ROUTES if r[0] not in PUBLIC])
def test_a_visitor_gets_no_content(client: Client, alice: User, name: str, path: str) -> None:
    for method in ("get", "post", "put", "patch", "delete", "head"):
        answer = getattr(client, method)(path)
        if answer.status_code == 302:
            assert answer.url.startswith("/login/")
        else:
            assert answer.status_code in (401, 403, 404, 405), (method, path)


@pytest.mark.parametrize(("name", "path"), [r for r in ROUTES if r[1].startswith("/console/")])
def test_a_member_who_is_no_admin_gets_nothing_of_the_console(
    client: Client, alice: User, bob: User, name: str, path: str
) -> None:
    client.force_login(bob)
    for method in ("get", "post"):
        assert getattr(client, method)(path).status_code in (403, 404, 405), (method, path)
