"""Signing in and out, and what stands against guessing."""

import logging

import pytest
from django.test import Client

from appliance.accounts.models import User
from appliance.accounts.services import user_set_active, user_set_password
from tests.appliance.base import PASSWORD

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quick_passwords")]

MISMATCH = "That name and password do not match."
TOO_MANY = "Too many wrong tries."


@pytest.fixture
def bob_with_password(bob: User) -> User:
    user_set_password(bob, PASSWORD)
    return bob


def try_sign_in(
    client: Client, name: str, password: str, *, address: str = "10.0.0.1", **headers: str
) -> str:
    answer = client.post(
        "/login/", {"login": name, "password": password}, REMOTE_ADDR=address, **headers
    )
    return "in" if answer.status_code == 302 else answer.content.decode()


def test_name_and_password_open_the_page_that_was_asked_for(
    client: Client, bob_with_password: User
) -> None:
    asked = client.get("/account/")
    assert asked.url == "/login/?next=/account/"
    answer = client.post("/login/", {"login": "bob", "password": PASSWORD, "next": "/account/"})
    assert answer.url == "/account/"
    assert "Your account" in client.get("/account/").content.decode()


def test_the_next_page_is_never_another_site(client: Client, bob_with_password: User) -> None:
    answer = client.post(
        "/login/", {"login": "bob", "password": PASSWORD, "next": "https://evil.example/"}
    )
    assert answer.url == "/"


def test_stay_signed_in_decides_whether_the_session_outlives_the_browser(
    client: Client, bob_with_password: User
) -> None:
    short = client.post("/login/", {"login": "bob", "password": PASSWORD})
    assert short.cookies["sessionid"]["max-age"] == ""
    client.post("/logout/")
    long = client.post("/login/", {"login": "bob", "password": PASSWORD, "remember": "on"})
    assert long.cookies["sessionid"]["max-age"] == 14 * 24 * 3600


def test_signing_out_takes_a_post(client: Client, bob: User) -> None:
    client.force_login(bob)
    assert client.get("/logout/").status_code == 405
    assert client.get("/account/").status_code == 200
    assert client.post("/logout/").url == "/login/"
    assert client.get("/account/").status_code == 302


def test_c22_sign_in_and_sign_out_refuse_forms_of_other_sites(bob_with_password: User) -> None:
    client = Client(enforce_csrf_checks=True)
    assert client.post("/login/", {"login": "bob", "password": PASSWORD}).status_code == 403
    client.force_login(bob_with_password)
    for path in ("/logout/", "/account/keys/", "/account/password/", "/console/users/"):
        assert client.post(path, "{}", content_type="text/plain").status_code == 403
    assert client.get("/account/").status_code == 200


def test_c23_unknown_wrong_and_switched_off_look_the_same(
    client: Client, bob_with_password: User
) -> None:
    assert MISMATCH in try_sign_in(client, "bob", "wrong")
    assert MISMATCH in try_sign_in(client, "nobody", "wrong")
    user_set_active(bob_with_password, False)
    assert MISMATCH in try_sign_in(client, "bob", PASSWORD)


def test_a_session_from_before_an_account_was_switched_off_is_gone_for_good(
    client: Client, bob_with_password: User, alice: User
) -> None:
    others = Client()
    others.force_login(alice)
    assert try_sign_in(client, "bob", PASSWORD) == "in"
    user_set_active(bob_with_password, False)
    user_set_active(bob_with_password, True)
    assert client.get("/account/").headers["Location"].startswith("/login/")
    assert others.get("/account/").status_code == 200
    assert try_sign_in(client, "bob", PASSWORD) == "in"


def test_c23_five_wrong_tries_lock_this_name_from_this_address_only(
    client: Client, bob_with_password: User, alice: User
) -> None:
    user_set_password(alice, PASSWORD)
    for _ in range(5):
        assert MISMATCH in try_sign_in(client, "bob", "wrong")
    assert TOO_MANY in try_sign_in(client, "bob", PASSWORD)
    assert TOO_MANY in try_sign_in(client, "BOB", PASSWORD)
    assert try_sign_in(Client(), "alice", PASSWORD) == "in"
    assert try_sign_in(Client(), "bob", PASSWORD, address="10.0.0.2") == "in"


def test_c23_a_made_up_forwarded_address_does_not_help(
    client: Client, bob_with_password: User
) -> None:
    for number in range(5):
        try_sign_in(client, "bob", "wrong", HTTP_X_FORWARDED_FOR=f"10.9.9.{number}")
    assert TOO_MANY in try_sign_in(client, "bob", PASSWORD, HTTP_X_FORWARDED_FOR="10.9.9.99")


def test_c23_many_names_from_one_address_are_slowed_down(client: Client, bob: User) -> None:
    answers = [try_sign_in(client, f"user{number}", "wrong") for number in range(41)]
    assert MISMATCH in answers[39]
    assert TOO_MANY in answers[40]


def test_c23_a_new_sign_in_link_opens_a_locked_account_at_once(
    client: Client, bob_with_password: User, alice: User
) -> None:
    for _ in range(6):
        try_sign_in(client, "bob", "wrong")
    admin = Client()
    admin.force_login(alice)
    page = admin.post(f"/console/users/{bob_with_password.pk}/link/").content.decode()
    path = "/invite/" + page.split("/invite/")[1].split("<")[0]
    assert client.post(path, {"password": "five-Gardens-rest"}).url == "/"
    assert client.get("/account/").status_code == 200


def test_failed_tries_are_logged_with_name_and_address_and_without_password(
    client: Client, bob_with_password: User, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    try_sign_in(client, "bob", "hunter2-guess", address="10.4.4.4")
    assert "sign-in failed for 'bob' from 10.4.4.4" in caplog.text
    assert "hunter2" not in caplog.text


def test_the_page_says_whether_the_way_is_encrypted(client: Client, bob: User) -> None:
    assert "is encrypted" in client.get("/login/", secure=True).content.decode()
    near = client.get("/login/", REMOTE_ADDR="127.0.0.1").content.decode()
    assert "from its own machine" in near
    far = client.get("/login/", REMOTE_ADDR="10.1.1.1").content.decode()
    assert "not encrypted" in far


def test_a_server_without_accounts_says_where_the_first_is_made(client: Client) -> None:
    page = client.get("/login/").content.decode()
    assert "one-time link" in page
    assert 'name="password"' not in page


def test_a_user_who_comes_with_a_session_is_noted_as_seen(client: Client, bob: User) -> None:
    client.force_login(bob)
    client.get("/account/")
    bob.refresh_from_db()
    assert bob.last_seen_at is not None
