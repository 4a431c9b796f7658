"""Every act of an admin is on record and can be read."""

import pytest
from django.test import Client

from appliance.accounts.models import User
from appliance.console.audit import ACTIONS, KINDS, audit_words
from appliance.console.models import AuditRecord

pytestmark = pytest.mark.django_db

PAGE = "/console/history/"


def test_what_is_done_to_members_is_on_record(admin: Client, bob: User) -> None:
    admin.post("/console/users/", {"username": "dora", "role": "member"})
    for action in ("make-admin", "take-admin", "deactivate", "activate", "link"):
        admin.post(f"/console/users/{bob.pk}/{action}/")
    words = [audit_words(record) for record in AuditRecord.objects.order_by("pk")]
    assert words == [
        "Added dora",
        # The link of a new member belongs to adding.
        "Made a sign-in link for dora",
        "Made admin: bob",
        "Took admin away from bob",
        "Switched off bob",
        "Switched on bob",
        "Made a sign-in link for bob",
    ]
    assert set(AuditRecord.objects.values_list("actor_name", flat=True)) == {"alice"}
    html = admin.get(PAGE).content.decode()
    assert html.index("Switched on bob") < html.index("Switched off bob")


def test_what_is_refused_is_not_on_record(admin: Client, alice: User) -> None:
    admin.post(f"/console/users/{alice.pk}/take-admin/")
    admin.post("/console/users/", {"username": "alice", "role": "member"})
    assert not AuditRecord.objects.exists()


def test_acts_of_before_read_well_and_unknown_ones_read(admin: Client) -> None:
    tuned = {"before": {"slots": 4, "enable_prefix_cache": True}}
    tuned["after"] = {"slots": 8, "enable_prefix_cache": False}
    make = AuditRecord.objects.create
    kill = {"owner": "bob", "written_tokens": 3}
    assert audit_words(make(actor_name="a", action="engine.tune", target="s", detail=tuned)) == (
        "Tuned: Parallel slots 4 → 8; Prefix cache on → off"
    )
    assert audit_words(make(actor_name="a", action="request.kill", target="r-9", detail=kill)) == (
        "Killed request r-9 of bob"
    )
    assert audit_words(make(actor_name="a", action="lamp.light", target="x")) == "lamp light x"
    assert admin.get(PAGE).status_code == 200


def test_names_are_shown_as_text(admin: Client) -> None:
    AuditRecord.objects.create(actor_name="<i>a</i>", action="user.link", target="<b>x</b>")
    html = admin.get(PAGE).content.decode()
    assert "<b>x" not in html
    assert "<i>a" not in html


def test_the_filter_and_the_pages(admin: Client) -> None:
    make = AuditRecord.objects.create
    for number in range(60):
        make(actor_name="a", action="user.link", target=f"member {number:02}")
    make(actor_name="a", action="key.revoke", target="the key")
    html = admin.get(PAGE).content.decode()
    assert "the key" in html
    assert "1–50 of 61" in html
    assert "member 00" in admin.get(PAGE + "?page=2").content.decode()
    users = admin.get(PAGE + "?kind=users").content.decode()
    assert "the key" not in users
    assert "kind=users&amp;page=2" in users
    assert "the key" in admin.get(PAGE + "?kind=rubbish").content.decode()


def test_every_action_has_a_kind_of_the_filter() -> None:
    assert {kind for kind, _ in ACTIONS.values()} == set(KINDS)
