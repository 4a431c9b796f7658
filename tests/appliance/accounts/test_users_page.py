"""The members page of admins, and the own password."""

from datetime import UTC, datetime, timedelta

import pytest
from django.core.management import call_command
from django.test import Client
from django.utils import timezone

from appliance.accounts.models import User
from appliance.accounts.services import user_set_password
from appliance.accounts.templatetags.display import ago
from tests.appliance.base import PASSWORD

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quick_passwords")]


@pytest.fixture
def admin(alice: User) -> Client:
    client = Client()
    client.force_login(alice)
    return client


def test_an_admin_adds_a_member_and_gets_their_link_once(admin: Client) -> None:
    page = admin.post("/console/users/", {"username": "dora", "role": "member"})
    assert "no-store" in page["Cache-Control"]
    link = page.content.decode().split('id="new-link">')[1].split("<")[0]
    assert link.startswith("http://testserver/invite/")
    assert link not in admin.get("/console/users/").content.decode()
    visitor = Client()
    assert visitor.post(link, {"password": PASSWORD}).url == "/"
    assert not User.objects.get(username="dora").is_admin


@pytest.mark.parametrize(("host", "is_local"), [("127.0.0.1:8000", True), ("testserver", False)])
def test_a_link_that_works_on_this_machine_only_says_so(
    admin: Client, host: str, is_local: bool
) -> None:
    page = admin.post("/console/users/", {"username": "dora", "role": "member"}, HTTP_HOST=host)
    assert ("which everybody's machine calls itself" in page.content.decode()) is is_local


def test_a_taken_or_odd_name_is_refused_in_place(admin: Client, bob: User) -> None:
    taken = admin.post("/console/users/", {"username": "Bob", "role": "member"})
    assert taken.status_code == 400
    assert "is taken" in taken.content.decode()
    odd = admin.post("/console/users/", {"username": "a b", "role": "member"})
    assert odd.status_code == 400
    assert User.objects.count() == 2


def test_the_list_shows_mark_role_and_state(admin: Client, bob: User) -> None:
    page = admin.get("/console/users/").content.decode()
    assert 'data-hue="2" data-shape="0"' in page
    assert "link not used yet" in page
    assert "<script>" not in page


def test_roles_change_both_ways(admin: Client, bob: User) -> None:
    admin.post(f"/console/users/{bob.pk}/make-admin/")
    bob.refresh_from_db()
    assert bob.is_admin
    page = admin.post(f"/console/users/{bob.pk}/take-admin/", follow=True).content.decode()
    assert "bob is a member now" in page
    bob.refresh_from_db()
    assert not bob.is_admin


def test_switching_a_member_off_ends_their_sessions_at_once(admin: Client, bob: User) -> None:
    session = Client()
    session.force_login(bob)
    admin.post(f"/console/users/{bob.pk}/deactivate/")
    assert session.get("/account/").status_code == 302
    admin.post(f"/console/users/{bob.pk}/activate/")
    bob.refresh_from_db()
    assert bob.is_active


def test_the_last_admin_is_told_why_nothing_changed(admin: Client, alice: User) -> None:
    page = admin.post(f"/console/users/{alice.pk}/deactivate/", follow=True).content.decode()
    assert "alice is the last admin" in page
    page = admin.post(f"/console/users/{alice.pk}/take-admin/", follow=True).content.decode()
    assert "alice is the last admin" in page


@pytest.mark.parametrize(
    "path", ["/console/users/", "/console/users/{}/make-admin/", "/console/users/{}/link/"]
)
def test_a_member_gets_403_from_everything_about_users(
    client: Client, bob: User, path: str
) -> None:
    client.force_login(bob)
    answer = client.post(path.format(bob.pk), {"username": "eve", "role": "admin"})
    assert answer.status_code == 403
    assert "Only admins can" in answer.content.decode()
    bob.refresh_from_db()
    assert not bob.is_admin


def test_changes_take_a_post_and_a_known_user(admin: Client, bob: User) -> None:
    assert admin.get(f"/console/users/{bob.pk}/make-admin/").status_code == 405
    assert admin.post("/console/users/999999/make-admin/").status_code == 404
    assert admin.post(f"/console/users/{bob.pk}/delete/").status_code == 404


def test_changing_the_own_password_signs_other_browsers_out(client: Client, bob: User) -> None:
    user_set_password(bob, PASSWORD)
    client.force_login(bob)
    other = Client()
    other.force_login(bob)
    answer = client.post(
        "/account/password/", {"old_password": PASSWORD, "password": "five-Gardens-rest"}
    )
    assert answer.url == "/account/"
    assert "other browsers are signed out" in client.get("/account/").content.decode()
    assert other.get("/account/").status_code == 302


def test_the_own_password_needs_the_old_one_and_guesses_are_limited(
    client: Client, bob: User
) -> None:
    user_set_password(bob, PASSWORD)
    client.force_login(bob)
    body = {"old_password": "wrong", "password": "five-Gardens-rest"}
    for _ in range(5):
        assert "not your password" in client.post("/account/password/", body).content.decode()
    assert client.post("/account/password/", body).status_code == 429
    bob.refresh_from_db()
    assert bob.check_password(PASSWORD)


def test_a_weak_new_password_is_refused(client: Client, bob: User) -> None:
    user_set_password(bob, PASSWORD)
    client.force_login(bob)
    body = {"old_password": PASSWORD, "password": "12345678"}
    assert "entirely numeric" in client.post("/account/password/", body).content.decode()


def test_djangos_own_command_makes_an_admin_with_a_mark(
    bob: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DJANGO_SUPERUSER_USERNAME", "root")
    monkeypatch.setenv("DJANGO_SUPERUSER_PASSWORD", PASSWORD)
    monkeypatch.setenv("DJANGO_SUPERUSER_EMAIL", "")
    call_command("createsuperuser", interactive=False, verbosity=0)
    root = User.objects.get(username="root")
    assert root.is_admin
    assert root.check_password(PASSWORD)
    assert (bob.mark_hue, root.mark_hue) == (1, 2)


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "now"), (240, "4 min ago"), (3 * 3600 + 9, "3 h ago")]
)
def test_recent_times_are_told_as_ages(seconds: int, text: str) -> None:
    assert ago(timezone.now() - timedelta(seconds=seconds)) == text


def test_older_times_are_told_as_dates() -> None:
    assert ago(datetime(2001, 3, 4, 5, 6, tzinfo=UTC)) == "4 Mar 2001 05:06"
