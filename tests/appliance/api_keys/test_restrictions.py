"""Where a key may be used, another secret for it, and accounts for scripts of nobody."""

from datetime import timedelta

import pytest
from django.contrib.auth import authenticate
from django.core.management import CommandError, call_command
from django.utils import timezone

from appliance.accounts.services import (
    invite_link_create,
    user_create,
    user_set_active,
    user_set_admin,
    user_set_password,
)
from appliance.api_keys.models import ApiKey
from appliance.api_keys.networks import networks_hold, networks_parse
from appliance.api_keys.services import (
    api_key_authenticate,
    api_key_issue,
    api_key_restrict,
    api_key_revoke,
    api_key_rotate,
    key_rules_set,
)
from appliance.console.audit import audit_words
from appliance.console.models import AuditRecord
from appliance.console.selectors import _users_by_owner
from appliance.errors import BadRequest, Conflict, NotAllowed, NotAuthenticated

pytestmark = pytest.mark.django_db


def opens(secret, address="192.0.2.7"):
    return api_key_authenticate(f"Bearer {secret}", scope="chat", address=address)


# ---- networks


def test_c11_a_key_opens_from_its_networks_only(bob):
    networks = networks_parse("10.0.0.0/8, 192.0.2.7 2001:db8::/32")
    _, secret = api_key_issue(bob, "report", allowed_networks=networks)
    for address in ("10.20.30.40", "192.0.2.7", "2001:db8::5", "::ffff:10.1.1.1"):
        opens(secret, address)
    for address in ("192.0.2.8", "::1", "2001:db9::1", "unknown", "", None, "10.1.1.1.evil"):
        with pytest.raises(NotAllowed, match="network address"):
            opens(secret, address)
    # Whoever does not know the secret learns nothing about its networks.
    with pytest.raises(NotAuthenticated):
        opens("bh_" + "x" * 40, "10.1.1.1")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        (" \n ", []),
        ("10.0.0.0/8,10.0.0.0/8; 192.0.2.7", ["10.0.0.0/8", "192.0.2.7/32"]),
        ("::1", ["::1/128"]),
    ],
)
def test_networks_are_taken_as_people_write_them(text, found):
    assert networks_parse(text) == found


@pytest.mark.parametrize("text", ["10.0.0.1/8", "10.0.0", "x", "10.0.0.0/33", "1.2.3.4/a"])
def test_what_is_no_network_is_named(text):
    with pytest.raises(BadRequest) as caught:
        networks_parse(f"192.0.2.0/24, {text}")
    assert text in caught.value.message
    if text == "10.0.0.1/8":
        assert "write 10.0.0.0/8" in caught.value.message


def test_too_many_networks_are_refused():
    with pytest.raises(BadRequest, match="too many"):
        networks_parse(" ".join(f"10.0.{number}.0/24" for number in range(51)))
    assert not networks_hold([], "10.0.0.1")


def test_restrictions_change_at_once_and_an_admins_change_is_on_record(alice, bob):
    key, secret = api_key_issue(bob, "report")
    api_key_restrict(key, allowed_models=[], allowed_networks=["10.0.0.0/8"])
    with pytest.raises(NotAllowed):
        opens(secret)
    api_key_restrict(key, allowed_models=[" small ", "small", ""], allowed_networks=[], by=alice)
    assert opens(secret).allowed_models == ["small"]
    [record] = AuditRecord.objects.all()
    assert audit_words(record) == (
        f"Changed key “report” ({key.prefix}): Networks 10.0.0.0/8 → none named; Models all → small"
    )
    with pytest.raises(BadRequest):
        api_key_restrict(key, allowed_models=["x" * 201], allowed_networks=[])


def test_the_command_takes_networks(bob, capsys):
    call_command("create_api_key", "bob", "--name", "x", "--networks", "10.0.0.0/8")
    assert ApiKey.objects.get().allowed_networks == ["10.0.0.0/8"]
    with pytest.raises(CommandError, match="no network"):
        call_command("create_api_key", "bob", "--name", "x", "--networks", "here")


# ---- another secret


@pytest.fixture
def clock(monkeypatch):
    now = [timezone.now()]
    monkeypatch.setattr(timezone, "now", lambda: now[0])
    return now


def test_after_a_rotation_both_secrets_open_until_the_chosen_time(bob, clock):
    key, old = api_key_issue(bob, "report", expires_in=timedelta(days=90))
    clock[0] += timedelta(days=80)
    new = api_key_rotate(key, timedelta(days=1))
    assert new != old
    assert opens(old).pk == opens(new).pk == key.pk
    stored = ApiKey.objects.get()
    assert stored.old_prefix == old[:7]
    assert stored.prefix == new[:7]
    # Its life begins anew.
    assert stored.expires_at == clock[0] + timedelta(days=90)
    clock[0] += timedelta(days=1)
    assert opens(new)
    with pytest.raises(NotAuthenticated, match="not known"):
        opens(old)


def test_a_second_rotation_ends_the_first_secret_and_no_overlap_ends_it_at_once(bob):
    key, first = api_key_issue(bob, "report")
    second = api_key_rotate(key, timedelta(days=7))
    third = api_key_rotate(key, timedelta())
    assert opens(third)
    for secret in (first, second):
        with pytest.raises(NotAuthenticated):
            opens(secret)


def test_an_old_secret_does_not_outlive_the_end_it_had(bob, clock):
    key, old = api_key_issue(bob, "report", expires_in=timedelta(days=2))
    api_key_rotate(key, timedelta(days=30))
    assert ApiKey.objects.get().old_until == clock[0] + timedelta(days=2)
    clock[0] += timedelta(days=3)
    with pytest.raises(NotAuthenticated):
        opens(old)


def test_a_revoked_key_opens_with_neither_secret_and_gets_no_other(bob):
    key, old = api_key_issue(bob, "report")
    new = api_key_rotate(key, timedelta(days=7))
    api_key_revoke(ApiKey.objects.get())
    for secret in (old, new):
        with pytest.raises(NotAuthenticated, match="revoked"):
            opens(secret)
    with pytest.raises(Conflict):
        api_key_rotate(key, timedelta(days=7))


def test_a_rotation_goes_by_the_admins_rules(alice, bob, clock):
    key, _ = api_key_issue(bob, "report")
    key_rules_set(alice, max_live_keys=1, max_life_days=30)
    api_key_rotate(key, timedelta())
    assert ApiKey.objects.get().expires_at == clock[0] + timedelta(days=30)


@pytest.mark.parametrize("overlap", [timedelta(seconds=-1), timedelta(days=31)])
def test_an_odd_overlap_changes_nothing(bob, overlap):
    key, secret = api_key_issue(bob, "report")
    with pytest.raises(BadRequest):
        api_key_rotate(key, overlap)
    assert opens(secret)


# ---- service accounts


def test_a_service_account_has_keys_and_no_way_to_sign_in(alice, rf):
    robot = user_create("robot", is_service=True, by=alice)
    _, secret = api_key_issue(robot, "nightly", by=alice)
    assert opens(secret).owner == robot
    with pytest.raises(Conflict, match="no sign-in"):
        invite_link_create(robot, by=alice)
    with pytest.raises(Conflict, match="cannot be an admin"):
        user_set_admin(robot, True, by=alice)
    with pytest.raises(NotAllowed):
        api_key_issue(robot, "all", ["admin"])
    # Even with a password, which nothing here gives it.
    user_set_password(robot, "nine-Lanterns-burn")
    assert authenticate(rf.post("/login/"), username="robot", password="nine-Lanterns-burn") is None
    user_set_active(robot, False, by=alice)
    with pytest.raises(NotAuthenticated):
        opens(secret)
    words = [audit_words(record) for record in AuditRecord.objects.order_by("pk")]
    assert words[0] == "Added the service account robot"
    assert words[1].startswith("Made key “nightly” (bh_")


def test_the_block_map_and_lists_show_it_as_such(bob):
    robot = user_create("robot", is_service=True)
    shown = _users_by_owner.func([str(robot.pk), str(bob.pk)])
    assert [name for name, *_ in shown.values()] == ["robot (service)", "bob"]
