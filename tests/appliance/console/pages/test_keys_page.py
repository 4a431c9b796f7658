"""The keys page: every member's keys, revoking one, and the rules for new ones."""

import uuid
from datetime import timedelta

import pytest
from django.test import Client

from appliance.accounts.models import User
from appliance.api_keys.services import (
    api_key_authenticate,
    api_key_issue,
    api_key_revoke,
    key_rules_set,
)
from appliance.console.audit import audit_words
from appliance.console.models import AuditRecord
from appliance.errors import BadRequest, Conflict, NotAuthenticated
from appliance.quotas.limits import quota_day
from appliance.quotas.models import UsageRecord

pytestmark = pytest.mark.django_db

PAGE = "/console/keys/"


def shown(admin: Client, query: str = "") -> str:
    return admin.get(PAGE + query).content.decode()


def test_all_members_keys_are_listed_and_no_secret(admin: Client, alice: User, bob: User) -> None:
    key, secret = api_key_issue(bob, "nightly report")
    api_key_issue(alice, "operations", ["admin"])
    html = shown(admin)
    for part in ("nightly report", "operations", key.prefix, "run the engine"):
        assert part in html
    assert secret not in html
    assert key.digest not in html


def test_tokens_are_those_of_seven_days(admin: Client, bob: User) -> None:
    key, _ = api_key_issue(bob, "nightly report")
    for days_ago, tokens in ((0, 1000), (6, 200), (7, 50_000)):
        UsageRecord.objects.create(
            reservation_id=uuid.uuid4(),
            request_id="r-1",
            user=bob,
            username="bob",
            key_id=key.pk,
            source="api",
            model="scripted",
            prompt_tokens=tokens,
            cached_tokens=0,
            completion_tokens=1,
            queue_s=0,
            duration_s=1,
            end="stop",
            day=quota_day() - timedelta(days=days_ago),
        )
    assert ">1,202</td>" in shown(admin)


def test_the_filter_goes_by_words_and_state(admin: Client, alice: User, bob: User) -> None:
    key, _ = api_key_issue(bob, "nightly report")
    api_key_issue(alice, "editor")
    assert "editor" not in shown(admin, "?q=bob+night")
    assert "nightly report" in shown(admin, "?q=bob+night")
    assert "nightly report" in shown(admin, f"?q={key.prefix}")
    assert "No key found for “&lt;b&gt;”" in shown(admin, "?q=%3Cb%3E")
    api_key_revoke(key)
    assert "nightly report" not in shown(admin, "?state=live&q=bob")
    assert "nightly report" in shown(admin, "?state=ended")
    assert "nightly report" in shown(admin, "?state=all")


def test_revoking_counts_at_once_and_is_on_record(admin: Client, bob: User) -> None:
    key, secret = api_key_issue(bob, "nightly report")
    page = admin.post(f"{PAGE}{key.pk}/revoke/", follow=True).content.decode()
    assert "Key “nightly report” of bob revoked" in page
    with pytest.raises(NotAuthenticated, match="revoked"):
        api_key_authenticate(f"Bearer {secret}", scope="chat")
    admin.post(f"{PAGE}{key.pk}/revoke/")
    record = AuditRecord.objects.get()
    assert audit_words(record) == f"Revoked key “nightly report” ({key.prefix}) of bob"


def test_the_most_keys_a_member_may_have(admin: Client, bob: User) -> None:
    admin.post(PAGE + "rules/", {"max_live_keys": "1", "max_life_days": ""})
    key, _ = api_key_issue(bob, "one")
    with pytest.raises(Conflict, match="1 live keys; 1 are allowed here"):
        api_key_issue(bob, "two")
    admin.post(f"{PAGE}{key.pk}/revoke/")
    api_key_issue(bob, "two")


def test_the_longest_life_of_a_key(admin: Client, bob: User) -> None:
    admin.post(PAGE + "rules/", {"max_live_keys": "50", "max_life_days": "60"})
    for life in (None, timedelta(days=61)):
        with pytest.raises(BadRequest, match="60 days at most here") as refused:
            api_key_issue(bob, "long", ["chat"], life)
        assert refused.value.param == "expires"
    api_key_issue(bob, "short", ["chat"], timedelta(days=60))


def test_members_are_offered_only_lives_that_the_rules_allow(alice: User, bob: User) -> None:
    key_rules_set(alice, max_live_keys=50, max_life_days=60)
    client = Client(headers={"host": "localhost"})
    client.force_login(bob)
    html = client.get("/account/").content.decode()
    choices = html.split('name="expires"')[1].split("</select>")[0]
    assert "30 days" in choices
    assert "60 days" in choices
    assert "90 days" not in choices
    assert "no end" not in choices
    client.post("/account/keys/", {"name": "a", "scopes": "chat", "expires": "60"})
    assert bob.api_keys.count() == 1


def test_the_servers_own_keys_go_by_no_rule(alice: User) -> None:
    key_rules_set(alice, max_live_keys=0, max_life_days=1)
    api_key_issue(alice, "capacity test", source="capacity")
    with pytest.raises(Conflict):
        api_key_issue(alice, "mine", ["chat"], timedelta(days=1))


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_live_keys", "many"), ("max_live_keys", "1001"), ("max_life_days", "0")],
)
def test_a_rule_out_of_range_is_refused_at_its_field(admin: Client, field: str, value: str) -> None:
    data = {"max_live_keys": "50", "max_life_days": "", field: value}
    answer = admin.post(PAGE + "rules/", data)
    assert answer.status_code == 400
    assert f'id="id_{field}_error"' in answer.content.decode()
    assert not AuditRecord.objects.exists()


def test_changed_rules_are_on_record(admin: Client) -> None:
    for _ in range(2):
        admin.post(PAGE + "rules/", {"max_live_keys": "50", "max_life_days": "365"})
    words = audit_words(AuditRecord.objects.get())
    assert words == "Changed the rules for keys: Longest life in days no limit → 365"


def test_many_keys_are_paged(admin: Client, bob: User) -> None:
    for number in range(49):
        api_key_issue(bob, f"key number {number:02}")
    api_key_issue(make_charlie(), "key of charlie")
    api_key_issue(make_charlie(), "another of charlie")
    assert "key number 00" not in shown(admin)
    assert "1–50 of 51" in shown(admin)
    assert "key number 00" in shown(admin, "?page=2")
    assert "key number 00" in shown(admin, "?page=rubbish&q=00")


def make_charlie() -> User:
    from appliance.accounts.services import user_create

    return User.objects.filter(username="charlie").first() or user_create("charlie")
