"""Weights of members and groups: set on the tuning page, given to the engine, on the record."""

from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import Group
from django.contrib.messages import get_messages
from django.test import Client

from appliance.accounts.models import User
from appliance.console import weights
from appliance.console.audit import audit_words
from appliance.console.feed import ConsoleFeed
from appliance.console.models import AuditRecord, ShareWeight
from appliance.console.weights import owner_weights, weight_set
from inference.scheduling.settings import check_changes
from tests.appliance.console.page import sign_in
from tests.appliance.console.simulated_backend import SimulatedBackend

URL = "/console/tuning/weights/"


def put(admin: Client, who: str, weight: Any) -> str:
    return told(admin.post(URL, {"who": who, "weight": weight}))


def told(answer: Any) -> str:
    """What the page that comes next says of it."""
    assert (answer.status_code, answer.url) == (302, "/console/tuning/")
    *_, message = get_messages(answer.wsgi_request)
    return str(message)


def test_a_members_own_weight_goes_before_groups_and_the_highest_group_holds(
    alice: User, bob: User
) -> None:
    first, second = Group.objects.create(name="first"), Group.objects.create(name="second")
    alice.groups.add(first, second)
    bob.groups.add(first, second)
    weight_set(first, 2.0, by=alice)
    weight_set(second, 4.0, by=alice)
    weight_set(bob, 0.5, by=alice)
    assert owner_weights() == {f"user:{alice.pk}": 4.0, f"user:{bob.pk}": 0.5}
    check_changes({"owner_weights": owner_weights()})
    second.delete()
    assert owner_weights() == {f"user:{alice.pk}": 2.0, f"user:{bob.pk}": 0.5}


def test_setting_and_taking_away_is_told_and_recorded(admin: Client, bob: User) -> None:
    assert "bob weighs 2." in put(admin, f"user:{bob.pk}", "2")
    assert "bob weighs 3." in put(admin, f"user:{bob.pk}", "3")
    row = ShareWeight.objects.get()
    assert "bob weighs 1 again." in told(admin.post(f"{URL}{row.pk}/clear/"))
    assert not ShareWeight.objects.exists()
    assert [audit_words(record) for record in AuditRecord.objects.all()] == [
        "Weight of bob: Share under load 3.0 → none",
        "Weight of bob: Share under load 2.0 → 3.0",
        "Weight of bob: Share under load none → 2.0",
    ]
    assert "gone already" in told(admin.post(f"{URL}{row.pk}/clear/"))


@pytest.mark.parametrize("weight", ["0", "-1", "101", "nan", "inf", "many", ""])
def test_a_bad_weight_changes_nothing(admin: Client, bob: User, weight: str) -> None:
    assert "0.01 to 100" in put(admin, f"user:{bob.pk}", weight)
    assert not ShareWeight.objects.exists()


@pytest.mark.parametrize(
    "who", ["user:999999", "group:1", "key:1", "user:x", "user:", "", "x" * 40]
)
def test_nobody_gets_no_weight(admin: Client, who: str) -> None:
    put(admin, who, "2")
    assert not ShareWeight.objects.exists()


def test_only_admins_set_weights(bob: User) -> None:
    for url in (URL, f"{URL}1/clear/"):
        assert sign_in(bob).post(url, {"who": f"user:{bob.pk}", "weight": 9}).status_code == 403
    assert not ShareWeight.objects.exists()


async def test_the_engine_gets_them_as_they_change_and_at_the_start(
    alice: User,
    bob: User,
    engine: SimulatedBackend,
    feed: ConsoleFeed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "LOOK_EVERY_S", 0.0)
    await sync_to_async(weight_set)(bob, 2.5, by=alice)
    await feed.look()
    assert engine.owner_weights == {f"user:{bob.pk}": 2.5}
    await ShareWeight.objects.all().adelete()
    await feed.look()
    assert engine.owner_weights == {}
