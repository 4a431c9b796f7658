"""The account page: own keys, own usage and quota."""

import uuid
from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from appliance.account_page.usage_chart import round_top, short_count, usage_chart
from appliance.accounts.models import User
from appliance.api_keys.models import ApiKey
from appliance.api_keys.services import api_key_authenticate, api_key_issue, api_key_revoke
from appliance.errors import NotAuthenticated
from appliance.quotas.limits import quota_day
from appliance.quotas.models import UsageRecord
from appliance.quotas.services import quota_reserve
from tests.appliance.limits import tokens_a_day

pytestmark = pytest.mark.django_db


@pytest.fixture
def bobs(client: Client, bob: User) -> Client:
    client.force_login(bob)
    return client


def make_record(user: User, tokens: int, *, days_ago: int = 0, key: ApiKey | None = None) -> None:
    UsageRecord.objects.create(
        reservation_id=uuid.uuid4(),
        request_id="r-1",
        user=user,
        username=user.username,
        key_id=key.pk if key else None,
        source="api" if key else "chat",
        model="scripted",
        prompt_tokens=tokens - 1,
        cached_tokens=0,
        completion_tokens=1,
        queue_s=0,
        duration_s=1,
        end="stop",
        day=quota_day() - timedelta(days=days_ago),
    )


def test_c06_a_new_key_is_shown_once_and_works(bobs: Client) -> None:
    page = bobs.post("/account/keys/", {"name": "report", "scopes": "chat,models", "expires": "90"})
    assert "no-store" in page["Cache-Control"]
    secret = page.content.decode().split('id="new-key">')[1].split("<")[0]
    key = api_key_authenticate(f"Bearer {secret}", scope="chat")
    assert key.name == "report"
    assert timedelta(days=89) < key.expires_at - timezone.now() <= timedelta(days=90)
    later = bobs.get("/account/").content.decode()
    assert secret not in later
    assert key.prefix in later


def test_the_page_says_which_address_each_kind_of_client_takes(bobs: Client) -> None:
    page = bobs.get("/account/").content.decode()
    assert '<code id="api-url">http://testserver/v1</code>' in page
    assert "Ollama's clients get <code>http://testserver</code>" in page


def test_a_key_without_end_and_a_key_with_wrong_fields(bobs: Client) -> None:
    bobs.post("/account/keys/", {"name": "report", "scopes": "chat", "expires": ""})
    assert ApiKey.objects.get().expires_at is None
    for bad in (
        {"name": "", "scopes": "chat", "expires": "90"},
        {"name": "x", "scopes": "root", "expires": "90"},
        {"name": "x", "scopes": "chat", "expires": "7"},
    ):
        assert bobs.post("/account/keys/", bad).status_code == 400
    assert ApiKey.objects.count() == 1


def test_a_member_is_not_offered_and_cannot_take_scope_admin(bobs: Client, alice: User) -> None:
    assert "run the engine" not in bobs.get("/account/").content.decode()
    answer = bobs.post("/account/keys/", {"name": "x", "scopes": "admin", "expires": "90"})
    assert answer.status_code == 400
    bobs.force_login(alice)
    assert "run the engine" in bobs.get("/account/").content.decode()
    bobs.post("/account/keys/", {"name": "ops", "scopes": "admin", "expires": "90"})
    assert ApiKey.objects.get().scopes == ["admin"]


def test_revoking_takes_effect_at_once(bobs: Client, bob: User) -> None:
    key, secret = api_key_issue(bob, "report")
    page = bobs.post(f"/account/keys/{key.pk}/revoke/", follow=True).content.decode()
    assert "Key “report” revoked" in page
    with pytest.raises(NotAuthenticated):
        api_key_authenticate(f"Bearer {secret}", scope="chat")


def test_a_test_key_that_is_over_is_not_listed(bobs: Client, bob: User) -> None:
    kept, _ = api_key_issue(bob, "report")
    internal, _ = api_key_issue(bob, "Capacity test", source="capacity")
    assert "Capacity test" in bobs.get("/account/").content.decode()
    api_key_revoke(kept)
    api_key_revoke(internal)
    page = bobs.get("/account/").content.decode()
    assert "Capacity test" not in page
    assert "report" in page


def test_c04_the_keys_of_somebody_else_are_neither_shown_nor_revocable(
    bobs: Client, charlie: User
) -> None:
    key, secret = api_key_issue(charlie, "charlies own")
    assert "charlies own" not in bobs.get("/account/").content.decode()
    page = bobs.post(f"/account/keys/{key.pk}/revoke/", follow=True).content.decode()
    assert "There is no such key" in page
    assert api_key_authenticate(f"Bearer {secret}", scope="chat").pk == key.pk


def test_c14_a_key_name_with_markup_is_shown_as_text(bobs: Client, bob: User) -> None:
    api_key_issue(bob, "<img src=x onerror=alert(1)>")
    page = bobs.get("/account/").content.decode()
    assert "<img" not in page
    assert "&lt;img src=x" in page


def test_usage_and_what_is_left_are_shown(bobs: Client, bob: User, alice: User) -> None:
    tokens_a_day(bob, 100_000)
    quota_reserve(bob.pk, prompt_tokens=800, completion_tokens=400)
    page = bobs.get("/account/").content.decode()
    assert "of 100,000" in page
    assert "98,800 left; 1,200 held for running answers" in page


def test_no_limit_is_called_no_limit(bobs: Client, bob: User, alice: User) -> None:
    tokens_a_day(bob, None)
    page = bobs.get("/account/").content.decode()
    assert "no limit" in page
    assert "<meter" not in page


def test_tokens_of_today_stand_beside_their_key(bobs: Client, bob: User) -> None:
    key, _ = api_key_issue(bob, "report")
    make_record(bob, 12_410, key=key)
    make_record(bob, 999, key=key, days_ago=1)
    page = bobs.get("/account/").content.decode()
    assert '<td class="r">12,410</td>' in page


def test_the_chart_splits_chat_and_keys_and_leaves_others_out(bob: User, charlie: User) -> None:
    key, _ = api_key_issue(bob, "report")
    make_record(bob, 300)
    make_record(bob, 100, key=key)
    make_record(bob, 50, days_ago=13)
    make_record(bob, 7777, days_ago=14)
    make_record(charlie, 5000)
    chart = usage_chart(bob, quota_day(), 1000)
    assert chart is not None
    assert [(bar.chat_tokens, bar.api_tokens) for bar in (chart.bars[0], chart.bars[-1])] == [
        (50, 0),
        (300, 100),
    ]
    assert chart.bars[-1].label == "today"
    assert (chart.bars[-1].chat_height, chart.bars[-1].api_height) == (23.4, 7.8)
    assert chart.limit_y == 12
    assert "Highest: 400" in chart.summary


def test_the_chart_leaves_out_a_quota_far_above_every_bar_and_is_absent_without_use(
    bob: User,
) -> None:
    assert usage_chart(bob, quota_day(), 1000) is None
    make_record(bob, 10)
    chart = usage_chart(bob, quota_day(), 1000)
    assert chart is not None
    assert chart.limit_y is None
    assert max(bar.chat_height for bar in chart.bars) == 78


@pytest.mark.parametrize(
    ("tokens", "text"), [(0, "0"), (850, "850"), (12_000, "12k"), (1_500_000, "1.5M")]
)
def test_axis_counts_are_short(tokens: int, text: str) -> None:
    assert short_count(tokens) == text


@pytest.mark.parametrize(
    ("most", "top"),
    [(1, 2), (7, 8), (11, 12), (100, 100), (486_488, 500_000), (1_000_001, 1_200_000), (999, 1000)],
)
def test_an_axis_ends_at_a_number_that_reads_well(most: int, top: int) -> None:
    assert round_top(most) == top


def test_an_axis_holds_every_bar_and_its_half_is_whole() -> None:
    for most in [*range(1, 2000), 123_456, 9_999_999]:
        assert most <= round_top(most) <= 2 * most
        assert round_top(most) % 2 == 0
