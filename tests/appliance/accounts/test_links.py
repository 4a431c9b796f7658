"""One-time links: the first set-up, invitations, new passwords."""

from datetime import timedelta

import pytest
from django.db import connection
from django.test import Client
from django.utils import timezone

from appliance.accounts.models import OneTimeLink, User
from appliance.accounts.services import (
    invite_link_create,
    link_find,
    setup_link_create,
    setup_link_use,
    user_create,
    user_set_password,
)
from appliance.errors import Conflict, NotFound
from tests.appliance.base import PASSWORD

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quick_passwords")]


def test_the_set_up_link_makes_the_first_admin_and_signs_them_in(client: Client) -> None:
    path = setup_link_create()
    assert "Set up this server" in client.get(path).content.decode()
    assert client.post(path, {"username": "alice", "password": PASSWORD}).url == "/"
    alice = User.objects.get()
    assert alice.is_admin
    assert (alice.mark_hue, alice.mark_shape) == (1, 0)
    assert client.get("/console/users/").status_code == 200


def test_the_set_up_link_works_once(client: Client) -> None:
    path = setup_link_create()
    client.post(path, {"username": "alice", "password": PASSWORD})
    for answer in (
        Client().get(path),
        Client().post(path, {"username": "eve", "password": PASSWORD}),
    ):
        assert answer.status_code == 404
        assert "does not work" in answer.content.decode()
    assert User.objects.count() == 1


def test_a_link_that_was_opened_twice_before_it_was_used_makes_one_admin() -> None:
    token = setup_link_create().split("/")[2]
    first, second = link_find(token, setup=True), link_find(token, setup=True)
    setup_link_use(first, username="alice", password=PASSWORD)
    with pytest.raises(NotFound):
        setup_link_use(second, username="eve", password=PASSWORD)
    assert User.objects.get().username == "alice"


def test_a_new_set_up_link_voids_the_one_before(client: Client) -> None:
    first, second = setup_link_create(), setup_link_create()
    assert client.get(first).status_code == 404
    assert client.get(second).status_code == 200


def test_there_is_no_set_up_once_there_is_a_user(client: Client) -> None:
    path = setup_link_create()
    user_create("made-by-a-script", is_admin=True)
    assert client.get(path).status_code == 404
    with pytest.raises(Conflict):
        setup_link_create()


def test_a_set_up_refusal_keeps_the_link_open(client: Client) -> None:
    path = setup_link_create()
    weak = client.post(path, {"username": "alice", "password": "password"}).content.decode()
    assert "too common" in weak
    odd = client.post(path, {"username": "a b", "password": PASSWORD}).content.decode()
    assert "valid username" in odd
    assert not User.objects.exists()
    assert client.post(path, {"username": "alice", "password": PASSWORD}).url == "/"


def test_an_invited_member_chooses_a_password_and_is_in(client: Client, bob: User) -> None:
    path = invite_link_create(bob)
    assert "bob" in client.get(path).content.decode()
    assert client.post(path, {"password": PASSWORD}).url == "/"
    bob.refresh_from_db()
    assert bob.check_password(PASSWORD)
    assert client.get("/account/").status_code == 200
    assert Client().get(path).status_code == 404


def test_an_invitation_ends_after_seven_days(client: Client, bob: User) -> None:
    path = invite_link_create(bob)
    link = OneTimeLink.objects.get()
    assert link.expires_at - link.created_at == timedelta(days=7)
    OneTimeLink.objects.update(expires_at=timezone.now())
    assert client.get(path).status_code == 404
    assert client.post(path, {"password": PASSWORD}).status_code == 404
    bob.refresh_from_db()
    assert not bob.has_usable_password()


def test_a_new_link_voids_the_one_before(client: Client, bob: User) -> None:
    first = invite_link_create(bob)
    invite_link_create(bob)
    assert client.get(first).status_code == 404


def test_using_a_reset_link_ends_the_other_sessions(client: Client, bob: User) -> None:
    user_set_password(bob, PASSWORD)
    other = Client()
    other.force_login(bob)
    path = invite_link_create(bob)
    assert "A new password for" in client.get(path).content.decode()
    client.post(path, {"password": "five-Gardens-rest"})
    assert other.get("/account/").status_code == 302
    assert client.get("/account/").status_code == 200


def test_an_invitation_is_no_set_up_and_the_other_way_round(client: Client) -> None:
    set_up = setup_link_create()
    assert client.get(set_up.replace("/setup/", "/invite/")).status_code == 404
    bob = user_create("bob")
    invite = invite_link_create(bob)
    assert client.get(invite.replace("/invite/", "/setup/")).status_code == 404


def test_the_database_holds_no_token(bob: User) -> None:
    token = invite_link_create(bob).split("/")[2]
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM accounts_onetimelink")
        assert token not in str(cursor.fetchall())


@pytest.mark.parametrize("token", ["x", "é", "%00", "a" * 500])
def test_a_made_up_token_is_just_not_found(client: Client, db: None, token: str) -> None:
    assert client.get(f"/invite/{token}/").status_code == 404
    assert client.get(f"/setup/{token}/").status_code == 404
