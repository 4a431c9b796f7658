"""The quotas page: rules are made, changed and deleted; who is at a limit; what each has left."""

import pytest
from django.contrib.auth.models import Group
from django.core.exceptions import ValidationError
from django.test import Client

from appliance.accounts.models import User
from appliance.accounts.number_field import CountField
from appliance.api_keys.services import api_key_issue
from appliance.console.models import AuditRecord
from appliance.quotas.models import LimitRule
from appliance.quotas.services import quota_reserve
from appliance.serving.gateway import gateway_install, gateway_remove
from appliance.serving.types import Caller, GenerationRequest
from tests.appliance.fake_backend import FakeBackend, FakeStream
from tests.appliance.limits import only_limit, tokens_a_day

pytestmark = pytest.mark.django_db

PAGE = "/console/quotas/"


@pytest.fixture(autouse=True)
def _no_rules(db: None) -> None:
    LimitRule.objects.all().delete()


def put(admin: Client, who: str, limit: str, value: str, wait_s: str = "") -> str:
    fields = {"who": who, "limit": limit, "value": value, "wait_s": wait_s}
    answer = admin.post(PAGE, fields, follow=True)
    assert answer.status_code == 200
    return answer.content.decode()


def row_of(html: str, name: str) -> str:
    return next(row for row in html.split("<tr>") if f"<strong>{name}</strong>" in row)


def members_row(admin: Client, name: str) -> str:
    return row_of(admin.get(PAGE).content.decode().split("members-title")[-1], name)


def test_a_rule_is_made_for_every_kind_of_subject_and_changed(admin: Client, bob: User) -> None:
    group = Group.objects.create(name="night shift")
    key, _ = api_key_issue(bob, "report")
    html = put(admin, "all", "tokens_per_day", "2M")
    assert "2,000,000 tokens a day" in row_of(html, "everybody")
    html = put(admin, f"group:{group.pk}", "requests_per_minute", "20", "30")
    row = row_of(html, "the group “night shift”")
    assert "20 requests a minute" in row
    assert "waits up to 30 s, then refused" in row
    html = put(admin, f"user:{bob.pk}", "concurrent_requests", "1")
    assert "1 request at a time" in row_of(html, "bob")
    assert "refused at once" in row_of(html, "bob")
    html = put(admin, f"key:{key.pk}", "slot_share", "25")
    assert "25 % of the slots" in html
    put(admin, "all", "tokens_per_day", "1M")
    assert LimitRule.objects.get(limit="tokens_per_day").value == 1_000_000
    assert LimitRule.objects.count() == 4


def test_the_form_is_filled_with_the_rule_that_is_changed(admin: Client, bob: User) -> None:
    only_limit("requests_per_minute", 1234, user=bob, wait_s=45)
    rule = LimitRule.objects.get()
    html = admin.get(f"{PAGE}?edit={rule.pk}").content.decode()
    assert 'value="1,234"' in html
    assert 'value="45"' in html
    assert f'<option value="user:{bob.pk}" selected' in html
    assert "Save rule" in html
    for odd in ("999999", "x", "-1", "9" * 30, ""):
        assert "Add rule" in admin.get(PAGE, {"edit": odd}).content.decode()


def test_a_rule_is_deleted_once(admin: Client, bob: User) -> None:
    tokens_a_day(bob, 100)
    url = f"{PAGE}{LimitRule.objects.get().pk}/delete/"
    assert "Rule for bob deleted" in admin.post(url, follow=True).content.decode()
    assert not LimitRule.objects.exists()
    assert "somebody deleted it" in admin.post(url, follow=True).content.decode()
    # Made, and deleted once.
    assert AuditRecord.objects.count() == 2


def test_used_held_and_left_are_those_of_now(admin: Client, bob: User) -> None:
    tokens_a_day(bob, 1000)
    quota_reserve(bob.pk, prompt_tokens=200, completion_tokens=100)
    row = members_row(admin, "bob")
    assert "+ 300 held" in row
    assert "700 " in row
    assert "of 1,000 tokens a day (rule for bob)" in row
    assert "no limit" in members_row(admin, "alice")


def test_who_is_at_a_limit_now_is_named_with_it(admin: Client, alice: User, bob: User) -> None:
    assert "Nobody is at a limit now" in admin.get(PAGE).content.decode()
    only_limit("tokens_per_day", 0, user=bob)
    html = admin.get(PAGE).content.decode()
    assert "At their limit now" in html
    assert "0 tokens a day (rule for bob), until" in row_of(html, "bob")

    backend = FakeBackend()
    caller = Caller(user_id=alice.pk, username="alice", source="chat")
    request = GenerationRequest(caller=caller, prompt="x")
    backend.running["r-1"] = FakeStream(backend, request, "r-1", 1, 1)
    gateway_install(backend)
    try:
        only_limit("concurrent_requests", 1)
        html = admin.get(PAGE).content.decode()
    finally:
        gateway_remove()
    assert "1 request at a time (rule for everybody): 1 run or wait" in row_of(html, "alice")
    assert html.count("run or wait") == 1


@pytest.mark.parametrize(
    ("limit", "value", "wait_s"),
    [
        ("tokens_per_day", "", ""),
        ("tokens_per_day", "many", ""),
        ("tokens_per_day", "-5", ""),
        ("tokens_per_day", "1.5", ""),
        ("tokens_per_day", "10,000,000,000,000,000", ""),
        ("tokens_per_day", "5", "10"),
        ("slot_share", "101", ""),
        ("slot_share", "10", "9999"),
        ("words_per_day", "10", ""),
    ],
)
def test_a_refusal_stands_at_its_field_and_keeps_what_was_typed(
    admin: Client, bob: User, limit: str, value: str, wait_s: str
) -> None:
    fields = {"who": f"user:{bob.pk}", "limit": limit, "value": value, "wait_s": wait_s}
    answer = admin.post(PAGE, fields)
    assert answer.status_code == 400
    html = answer.content.decode()
    assert "field-error" in html
    if value:
        assert f'value="{value}"' in html
    assert not LimitRule.objects.exists()
    assert not AuditRecord.objects.exists()


@pytest.mark.parametrize("who", ["", "user:", "user:999999", "key:1", "group:x", "nobody"])
def test_a_subject_that_is_not_offered_is_refused(admin: Client, who: str) -> None:
    fields = {"who": who, "limit": "tokens_per_day", "value": "5"}
    assert admin.post(PAGE, fields).status_code == 400
    assert not LimitRule.objects.exists()


def test_members_change_nothing_here(bob: User) -> None:
    client = Client(headers={"host": "localhost"})
    client.force_login(bob)
    tokens_a_day(bob, 100)
    rule = LimitRule.objects.get()
    assert client.get(PAGE).status_code == 403
    fields = {"who": "all", "limit": "tokens_per_day", "value": "5"}
    assert client.post(PAGE, fields).status_code == 403
    assert client.post(f"{PAGE}{rule.pk}/delete/").status_code == 403
    assert LimitRule.objects.get() == rule


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5,000,000", 5_000_000),
        ("5 000 000", 5_000_000),
        ("5'000'000", 5_000_000),
        ("250k", 250_000),
        ("1.5M", 1_500_000),
        ("0.25M", 250_000),
        ("7", 7),
    ],
)
def test_numbers_are_taken_as_people_write_them(text: str, number: int) -> None:
    assert CountField(label="", low=0, high=10**15).clean(text) == number


@pytest.mark.parametrize("text", ["1.5", "1.2345k", "1e6", "٥", "k", "1.", "5,0x"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="no whole number"):
        CountField(label="", low=0, high=10**15).clean(text)
