"""Issue, look-up, expiry and revocation of API keys."""

import time
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.utils import timezone

from appliance.accounts.models import User
from appliance.accounts.services import user_set_active, user_set_admin
from appliance.api_keys.models import ApiKey
from appliance.api_keys.services import (
    api_key_authenticate,
    api_key_issue,
    api_key_of,
    api_key_revoke,
    key_rules,
)
from appliance.errors import BadRequest, Conflict, NotAllowed, NotAuthenticated, NotFound

pytestmark = pytest.mark.django_db


def test_an_issued_key_opens_its_scopes_and_no_other(bob: User) -> None:
    key, secret = api_key_issue(bob, "report", ["chat"])
    got = api_key_authenticate(f"Bearer {secret}", scope="chat")
    assert (got.pk, got.owner) == (key.pk, bob)
    with pytest.raises(NotAllowed, match="scope models"):
        api_key_authenticate(f"Bearer {secret}", scope="models")


def test_c06_the_database_holds_prefix_and_digest_but_never_the_secret(bob: User) -> None:
    _, secret = api_key_issue(bob, "report")
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM api_keys_apikey")
        stored = str(cursor.fetchall())
    assert secret[:7] in stored
    assert secret[7:] not in stored
    assert secret.startswith("bh_")
    assert len(secret) == 43


def test_c06_the_lookup_uses_the_index_and_is_quick(bob: User) -> None:
    _, secret = api_key_issue(bob, "report")
    api_key_authenticate(f"Bearer {secret}", scope="chat")
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute("EXPLAIN QUERY PLAN SELECT id FROM api_keys_apikey WHERE digest = 'x'")
            assert "USING" in str(cursor.fetchall())
    start = time.process_time()
    for _ in range(50):
        api_key_authenticate(f"Bearer {secret}", scope="chat")
    # A password hasher would need seconds here; 20 ms each leaves room for a busy machine.
    assert (time.process_time() - start) / 50 < 0.02


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        b"",
        "Bearer",
        "Bearer ",
        "Bearer \t ",
        "Basic x",
        "Basic Ym9iOmJvYg==",
        b"Bearer caf\xe9",
        b"\xe9",
        b"\xff\xfe Bearer x",
        "Bearer “smart”",
        "Bearer \ud800",
        b"Bearer a\0b",
        b"Bearer a\tb",
        b"Bearer " + b"x" * 8192,
        "Bearer bh_" + "A" * 40,
        "Bearer sk-proj-abc",
        "bh_" + "A" * 40,
    ],
)
def test_c08_every_header_without_a_known_key_is_not_authenticated(
    db: None, header: bytes | str | None
) -> None:
    with pytest.raises(NotAuthenticated):
        api_key_authenticate(header, scope="chat")


@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "BEARER   {} ", " Bearer {}\t"])
def test_c08_case_of_the_scheme_and_blanks_around_the_key_do_not_matter(
    bob: User, form: str
) -> None:
    _, secret = api_key_issue(bob, "report")
    for header in (form.format(secret), form.format(secret).encode()):
        assert api_key_authenticate(header, scope="chat").owner == bob


def test_a_revoked_key_is_refused_at_once_and_says_so(bob: User) -> None:
    key, secret = api_key_issue(bob, "report")
    api_key_revoke(key)
    first = ApiKey.objects.get().revoked_at
    api_key_revoke(key)
    assert ApiKey.objects.get().revoked_at == first
    with pytest.raises(NotAuthenticated, match="revoked"):
        api_key_authenticate(f"Bearer {secret}", scope="chat")


def test_an_expired_key_is_refused_and_says_so(bob: User) -> None:
    key, secret = api_key_issue(bob, "report", expires_in=timedelta(days=1))
    assert api_key_authenticate(f"Bearer {secret}", scope="chat") == key
    ApiKey.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    with pytest.raises(NotAuthenticated, match="expired"):
        api_key_authenticate(f"Bearer {secret}", scope="chat")


def test_keys_of_a_switched_off_user_are_refused_and_work_again_after_it(bob: User) -> None:
    _, secret = api_key_issue(bob, "report")
    user_set_active(bob, False)
    with pytest.raises(NotAuthenticated, match="switched off"):
        api_key_authenticate(f"Bearer {secret}", scope="chat")
    user_set_active(bob, True)
    api_key_authenticate(f"Bearer {secret}", scope="chat")


def test_scope_admin_needs_an_admin_at_issue_and_at_use(alice: User, bob: User) -> None:
    with pytest.raises(NotAllowed):
        api_key_issue(bob, "ops", ["admin"])
    _, secret = api_key_issue(alice, "ops", ["admin"])
    api_key_authenticate(f"Bearer {secret}", scope="admin")
    user_set_admin(bob, True)
    user_set_admin(alice, False)
    with pytest.raises(NotAllowed, match="no longer an admin"):
        api_key_authenticate(f"Bearer {secret}", scope="admin")


def test_use_is_noted_with_its_address_at_most_once_a_minute(bob: User) -> None:
    _, secret = api_key_issue(bob, "report")
    api_key_authenticate(f"Bearer {secret}", scope="chat", address="10.1.2.3")
    first = ApiKey.objects.get()
    assert first.last_used_from == "10.1.2.3"
    api_key_authenticate(f"Bearer {secret}", scope="chat", address="10.9.9.9")
    assert ApiKey.objects.get().last_used_at == first.last_used_at
    ApiKey.objects.update(last_used_at=timezone.now() - timedelta(minutes=2))
    api_key_authenticate(f"Bearer {secret}", scope="chat", address="not an address")
    assert ApiKey.objects.get().last_used_from is None
    assert ApiKey.objects.get().last_used_at > first.last_used_at


def test_keys_survive_a_change_of_the_server_key_while_the_old_one_is_a_fallback(
    bob: User, settings: pytest.FixtureRequest
) -> None:
    _, secret = api_key_issue(bob, "report")
    old = settings.SECRET_KEY
    settings.SECRET_KEY = "another-key-for-the-server"
    with pytest.raises(NotAuthenticated):
        api_key_authenticate(f"Bearer {secret}", scope="chat")
    settings.SECRET_KEY_FALLBACKS = [old]
    assert api_key_authenticate(f"Bearer {secret}", scope="chat").owner == bob


def test_wrong_names_scopes_and_lives_are_refused(bob: User) -> None:
    for bad in (
        {"name": " "},
        {"name": "x" * 81},
        {"name": "two\nlines"},
        {"name": "colour\x1b[31m"},
        {"scopes": []},
        {"scopes": ["chat", "root"]},
        {"expires_in": timedelta(0)},
        {"expires_in": timedelta(days=100_000)},
    ):
        with pytest.raises(BadRequest):
            api_key_issue(bob, **{"name": "report", **bad})
    assert not ApiKey.objects.exists()


def test_a_user_has_at_most_fifty_live_keys(bob: User) -> None:
    keys = [api_key_issue(bob, f"key {number}")[0] for number in range(key_rules().max_live_keys)]
    with pytest.raises(Conflict, match="Revoke one"):
        api_key_issue(bob, "one more")
    api_key_revoke(keys[0])
    api_key_issue(bob, "one more")


def test_the_key_of_somebody_else_does_not_exist(bob: User, charlie: User) -> None:
    key, _ = api_key_issue(bob, "report")
    with pytest.raises(NotFound):
        api_key_of(charlie, key.pk)


def test_the_command_prints_the_key_alone_on_standard_output(alice: User) -> None:
    out = StringIO()
    call_command(
        "create_api_key",
        "alice",
        "--name",
        "ops",
        "--scopes",
        "chat,models,admin",
        "--expires",
        "90d",
        stdout=out,
    )
    secret = out.getvalue().removesuffix("\n")
    key = api_key_authenticate(f"Bearer {secret}", scope="admin")
    assert key.name == "ops"
    assert key.expires_at is not None
    assert timedelta(days=89) < key.expires_at - timezone.now() <= timedelta(days=90)


def test_the_command_can_bind_a_key_to_models(bob: User) -> None:
    arguments = ["bob", "--name", "x", "--models", "small, large"]
    call_command("create_api_key", *arguments, stdout=StringIO())
    assert ApiKey.objects.get().allowed_models == ["small", "large"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nobody", "--name", "x"], "no user"),
        (["bob", "--name", "x", "--scopes", "admin"], "Only an admin"),
        (["bob", "--name", "x", "--scopes", "all"], "Scopes are"),
        (["bob", "--name", "x", "--expires", "soon"], "90d"),
        (["bob", "--name", " "], "needs a name"),
    ],
)
def test_the_command_says_what_is_wrong(bob: User, arguments: list[str], said: str) -> None:
    with pytest.raises(CommandError, match=said):
        call_command("create_api_key", *arguments, stdout=StringIO())
