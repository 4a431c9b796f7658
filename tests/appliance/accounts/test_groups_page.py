"""Groups: made, filled and deleted by admins, on record."""

import pytest
from django.contrib.auth.models import Group
from django.test import Client

from appliance.accounts.models import User
from appliance.console.audit import audit_words
from appliance.console.models import AuditRecord
from appliance.quotas.models import LimitRule
from appliance.quotas.rules import limit_rule_save, limits_of

PAGE = "/console/groups/"


@pytest.fixture
def admin(alice: User) -> Client:
    client = Client(headers={"host": "localhost"})
    client.force_login(alice)
    return client


def test_a_group_is_made_filled_and_deleted_with_its_rules(
    admin: Client, alice: User, bob: User
) -> None:
    LimitRule.objects.all().delete()
    html = admin.post(PAGE, {"name": " night shift "}, follow=True).content.decode()
    assert "nobody yet" in html
    group = Group.objects.get(name="night shift")
    limit_rule_save("requests_per_minute", 5, group=group, by=alice)
    url = f"{PAGE}{group.pk}"
    html = admin.post(f"{url}/members/", {"members": [bob.pk, alice.pk]}, follow=True)
    assert "alice, bob" in html.content.decode()
    assert [limit.value for limit in limits_of(bob.pk)] == [5]
    admin.post(f"{url}/members/", {"members": [alice.pk]})
    assert limits_of(bob.pk) == []
    admin.post(f"{url}/delete/")
    assert limits_of(alice.pk) == []
    assert User.objects.filter(username="bob").exists()
    words = [audit_words(record) for record in AuditRecord.objects.order_by("pk")]
    assert words == [
        "Made the group night shift",
        "Made a rule for the group “night shift”: Requests a minute no limit → 5",
        "Changed the group night shift: Members nobody → alice, bob",
        "Changed the group night shift: Members alice, bob → alice",
        "Deleted the group night shift",
    ]


@pytest.mark.parametrize("name", ["", "   ", "x" * 81, "two\nlines", "Other Team"])
def test_a_name_that_is_odd_or_taken_is_refused(admin: Client, charlie: User, name: str) -> None:
    answer = admin.post(PAGE, {"name": name})
    assert answer.status_code == 400
    assert "field-error" in answer.content.decode()
    assert Group.objects.count() == 1


def test_odd_members_and_gone_groups_change_nothing(admin: Client, charlie: User) -> None:
    group = charlie.groups.get()
    for members in (["x"], ["-1"], ["9" * 40]):
        admin.post(f"{PAGE}{group.pk}/members/", {"members": members})
        assert list(group.user_set.all()) == [charlie]
    html = admin.post(f"{PAGE}999999/delete/", follow=True).content.decode()
    assert "This group is gone" in html


def test_members_may_not_c04(bob: User, charlie: User) -> None:
    client = Client(headers={"host": "localhost"})
    client.force_login(bob)
    url = f"{PAGE}{charlie.groups.get().pk}"
    for answer in (
        client.get(PAGE),
        client.post(PAGE, {"name": "mine"}),
        client.post(f"{url}/members/", {"members": [bob.pk]}),
        client.post(f"{url}/delete/"),
    ):
        assert answer.status_code == 403
    assert not bob.groups.exists()
