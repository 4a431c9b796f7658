"""Service accounts and single keys on pages: what admins may do, and what owners may."""

import re
from datetime import timedelta

import pytest

from appliance.accounts.models import User
from appliance.accounts.services import user_create
from appliance.api_keys.models import ApiKey
from appliance.api_keys.services import api_key_authenticate, api_key_issue
from appliance.errors import NotAllowed, NotAuthenticated
from appliance.quotas.models import LimitRule
from appliance.quotas.rules import limit_rule_save, limits_of
from tests.appliance.console.page import sign_in

pytestmark = pytest.mark.django_db

PAGE = "/console/service-accounts/"


@pytest.fixture(autouse=True)
def _no_rules(db: None) -> None:
    LimitRule.objects.all().delete()


def secret_in(html: str) -> str:
    found = re.search(r'id="new-key">(bh_\w+)<', html)
    assert found
    return found[1]


def test_an_admin_makes_one_with_a_key_and_another_secret(alice: User) -> None:
    admin = sign_in(alice)
    html = admin.post(PAGE, {"username": "robot"}, follow=True).content.decode()
    assert "No keys yet" in html
    robot = User.objects.get(username="robot")
    assert robot.is_service
    fields = {"name": "nightly", "scopes": "chat,models", "expires": "90"}
    old = secret_in(admin.post(f"{PAGE}{robot.pk}/", fields).content.decode())
    assert api_key_authenticate(f"Bearer {old}", scope="chat").owner == robot
    assert "1</td>" in admin.get(PAGE).content.decode()
    key = ApiKey.objects.get()
    html = admin.post(
        f"/console/keys/{key.pk}/", {"act": "rotate", "overlap": "1"}
    ).content.decode()
    new = secret_in(html)
    assert new != old
    assert new not in admin.get(f"/console/keys/{key.pk}/").content.decode()
    for page in ("users", "keys", "quotas"):
        assert "robot" in admin.get(f"/console/{page}/").content.decode()
    assert "robot (service)" in admin.get("/console/keys/").content.decode()


@pytest.mark.parametrize("name", ["", "a b", "alice", "ALICE"])
def test_a_name_that_is_odd_or_taken_is_refused(alice: User, name: str) -> None:
    answer = sign_in(alice).post(PAGE, {"username": name})
    assert answer.status_code == 400
    assert "field-error" in answer.content.decode()
    assert User.objects.count() == 1


def test_c04_members_see_none_of_it(alice: User, bob: User) -> None:
    robot = user_create("robot", is_service=True)
    key, secret = api_key_issue(robot, "nightly")
    member = sign_in(bob)
    for url in (PAGE, f"{PAGE}{robot.pk}/", f"/console/keys/{key.pk}/"):
        assert member.get(url).status_code == 403
        assert member.post(url, {"act": "rotate", "overlap": "0"}).status_code == 403
    own = f"/account/keys/{key.pk}/"
    assert "There is no such key" in member.get(own, follow=True).content.decode()
    member.post(own, {"act": "rotate", "overlap": "0"})
    assert api_key_authenticate(f"Bearer {secret}", scope="chat")
    # A member is no service account, even for admins.
    assert sign_in(alice).get(f"{PAGE}{bob.pk}/").status_code == 404


def test_an_admin_restricts_a_members_key_but_gets_no_secret_of_it(alice: User, bob: User) -> None:
    key, secret = api_key_issue(bob, "report")
    admin = sign_in(alice)
    url = f"/console/keys/{key.pk}/"
    assert "Make another secret" not in admin.get(url).content.decode()
    assert admin.post(url, {"act": "rotate", "overlap": "0"}).status_code == 403
    admin.post(url, {"act": "limits", "models": "small", "networks": "10.0.0.0/8"})
    with pytest.raises(NotAllowed):
        api_key_authenticate(f"Bearer {secret}", scope="chat", address="192.0.2.1")
    assert "from 10.0.0.0/8" in admin.get("/console/keys/").content.decode()


def test_an_owner_limits_and_renews_the_own_key(bob: User, alice: User) -> None:
    key, old = api_key_issue(bob, "report")
    member = sign_in(bob)
    url = f"/account/keys/{key.pk}/"
    fields = {"models": "", "networks": "", "requests_per_minute": "1k", "tokens_per_day": "2M"}
    html = member.post(url, {"act": "limits", **fields}, follow=True).content.decode()
    assert 'value="1,000"' in html
    assert {limit.name: limit.value for limit in limits_of(bob.pk, key.pk)} == {
        "requests_per_minute": 1000,
        "tokens_per_day": 2_000_000,
    }
    fields["tokens_per_day"] = ""
    member.post(url, {"act": "limits", **fields})
    assert [limit.name for limit in limits_of(bob.pk, key.pk)] == ["requests_per_minute"]
    new = secret_in(member.post(url, {"act": "rotate", "overlap": "0"}).content.decode())
    assert api_key_authenticate(f"Bearer {new}", scope="chat")
    with pytest.raises(NotAuthenticated):
        api_key_authenticate(f"Bearer {old}", scope="chat")


def test_an_owner_cannot_loosen_what_an_admin_set(bob: User, alice: User) -> None:
    key, _ = api_key_issue(bob, "report")
    limit_rule_save("tokens_per_day", 100, key=key, by=alice)
    url = f"/account/keys/{key.pk}/"
    fields = {"act": "limits", "models": "small", "networks": "", "requests_per_minute": "5"}
    for tokens in ("5M", "", "50"):
        answer = sign_in(bob).post(url, {**fields, "tokens_per_day": tokens})
        assert answer.status_code == 400
        assert "An admin set this limit" in answer.content.decode()
    assert [limit.value for limit in limits_of(bob.pk, key.pk)] == [100]
    # Nothing else of the form was saved either.
    assert ApiKey.objects.get().allowed_models == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("networks", "here"),
        ("networks", "10.0.0.1/8"),
        ("tokens_per_day", "-1"),
        ("models", "x" * 300),
    ],
)
def test_a_refusal_stands_at_its_field_and_keeps_what_was_typed(
    bob: User, name: str, value: str
) -> None:
    key, _ = api_key_issue(bob, "report")
    fields = {"act": "limits", "models": "", "networks": "", name: value}
    answer = sign_in(bob).post(f"/account/keys/{key.pk}/", fields)
    assert answer.status_code == 400
    html = answer.content.decode()
    assert "field-error" in html
    assert value in html


def test_a_key_that_ended_is_shown_and_gets_no_secret(bob: User) -> None:
    key, _ = api_key_issue(bob, "report", expires_in=timedelta(days=1))
    ApiKey.objects.update(expires_at=key.created_at)
    url = f"/account/keys/{key.pk}/"
    member = sign_in(bob)
    assert "It opens nothing" in member.get(url).content.decode()
    answer = member.post(url, {"act": "rotate", "overlap": "1"})
    assert answer.status_code == 400
    assert "bh_" not in answer.content.decode().replace(key.prefix, "")
