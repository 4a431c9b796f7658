"""The quotas page: rules for everybody and for one, what is used and left, and the record of it."""

import pytest
from django.core.exceptions import ValidationError
from django.test import Client

from appliance.accounts.models import User
from appliance.console.audit import audit_words
from appliance.console.models import AuditRecord
from appliance.console.number_field import CountField
from appliance.quotas.services import (
    DEFAULT_TOKENS_PER_DAY,
    quota_default_limit,
    quota_limit,
    quota_reserve,
)
from tests.appliance.base import make_alice, make_bob

pytestmark = pytest.mark.django_db

PAGE = "/console/quotas/"


@pytest.fixture
def alice(db: None) -> User:
    return make_alice()


@pytest.fixture
def bob(db: None) -> User:
    return make_bob()


@pytest.fixture
def admin(alice: User) -> Client:
    client = Client(headers={"host": "localhost"})
    client.force_login(alice)
    return client


def put(admin: Client, whose: object, act: str, tokens: str = "") -> str:
    answer = admin.post(f"{PAGE}{whose}/", {"act": act, "tokens": tokens}, follow=True)
    assert answer.status_code == 200
    return answer.content.decode()


def row_of(html: str, name: str) -> str:
    return next(row for row in html.split("<tr>") if f"<strong>{name}</strong>" in row)


def test_the_rule_for_everybody_holds_for_whoever_has_no_own(admin: Client, bob: User) -> None:
    assert quota_default_limit() == DEFAULT_TOKENS_PER_DAY
    put(admin, "everybody", "set", "2,000,000")
    assert quota_limit(bob.pk) == 2_000_000
    html = put(admin, bob.pk, "set", "100k")
    assert quota_limit(bob.pk) == 100_000
    assert "own</span> 100,000" in row_of(html, "bob")
    assert "everybody</span> 2,000,000" in row_of(html, "alice")
    html = put(admin, bob.pk, "clear")
    assert quota_limit(bob.pk) == 2_000_000
    assert "everybody</span> 2,000,000" in row_of(html, "bob")


def test_no_limit_for_one_and_for_all(admin: Client, bob: User) -> None:
    # What was typed does not count when the other button is pressed.
    assert "own</span> no limit" in row_of(put(admin, bob.pk, "none", "rubbish"), "bob")
    assert quota_limit(bob.pk) is None
    put(admin, "everybody", "none")
    assert quota_default_limit() is None


def test_nothing_at_all_is_a_limit_too(admin: Client, bob: User) -> None:
    put(admin, bob.pk, "set", "0")
    assert quota_limit(bob.pk) == 0
    assert "none</span>" in row_of(admin.get(PAGE).content.decode(), "bob")


def test_used_held_and_left_are_those_of_today(admin: Client, bob: User) -> None:
    put(admin, bob.pk, "set", "1,000")
    quota_reserve(bob.pk, prompt_tokens=200, completion_tokens=100)
    row = row_of(admin.get(PAGE).content.decode(), "bob")
    assert "+ 300 held" in row
    assert ">700<" in row


@pytest.mark.parametrize("text", ["", "many", "-5", "1.5", "10,000,000,000,000,000"])
def test_a_refusal_stands_in_the_members_row(admin: Client, bob: User, text: str) -> None:
    answer = admin.post(f"{PAGE}{bob.pk}/", {"act": "set", "tokens": text})
    assert answer.status_code == 400
    html = answer.content.decode()
    assert "field-error" in row_of(html, "bob")
    assert "field-error" not in row_of(html, "alice")
    assert quota_limit(bob.pk) == DEFAULT_TOKENS_PER_DAY
    assert not AuditRecord.objects.exists()


def test_everybody_cannot_be_as_everybody_and_an_unknown_button_does_nothing(
    admin: Client, bob: User
) -> None:
    assert admin.post(f"{PAGE}{bob.pk}/", {"act": "delete"}).status_code == 400
    assert admin.post(f"{PAGE}999999/", {"act": "none"}).status_code == 404
    assert not AuditRecord.objects.exists()


def test_each_change_is_on_record_with_before_and_after(admin: Client, bob: User) -> None:
    put(admin, bob.pk, "set", "100k")
    put(admin, bob.pk, "clear")
    put(admin, "everybody", "none")
    words = [(record.actor_name, audit_words(record)) for record in AuditRecord.objects.all()]
    assert words == [
        ("alice", "Quota of everybody: Tokens a day 5,000,000 → no limit"),
        ("alice", "Quota of bob: Tokens a day 100,000 → 5,000,000"),
        ("alice", "Quota of bob: Tokens a day 5,000,000 → 100,000"),
    ]


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
