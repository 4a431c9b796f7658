"""Making users, roles and marks."""

import pytest
from django.core.exceptions import ValidationError

from appliance.accounts.models import User
from appliance.accounts.services import (
    invite_link_create,
    link_find,
    user_create,
    user_seen,
    user_set_active,
    user_set_admin,
    user_set_password,
)
from appliance.errors import Conflict, NotFound
from tests.appliance.base import PASSWORD

pytestmark = pytest.mark.django_db


def test_a_new_user_gets_the_mark_in_use_by_the_fewest_hues_before_shapes() -> None:
    users = [user_create(f"user{number}") for number in range(10)]
    marks = [(user.mark_hue, user.mark_shape) for user in users]
    assert marks == [(hue, 0) for hue in range(1, 9)] + [(1, 1), (2, 1)]
    users[3].delete()
    again = user_create("late")
    assert (again.mark_hue, again.mark_shape) == (4, 0)


def test_after_32_users_marks_repeat_from_the_first() -> None:
    marks = [(u.mark_hue, u.mark_shape) for u in (user_create(f"u{n}") for n in range(33))]
    assert len(set(marks[:32])) == 32
    assert marks[32] == marks[0]


def test_a_name_is_taken_whatever_its_case(bob: User) -> None:
    with pytest.raises(Conflict, match="taken"):
        user_create("BOB")


@pytest.mark.parametrize("name", ["", " ", "a b", "x" * 151, "<img>"])
def test_a_name_that_cannot_be_typed_at_sign_in_is_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        user_create(name)
    assert not User.objects.exists()


def test_the_last_admin_can_neither_be_demoted_nor_switched_off(alice: User, bob: User) -> None:
    with pytest.raises(Conflict, match="last admin"):
        user_set_admin(alice, False)
    with pytest.raises(Conflict, match="last admin"):
        user_set_active(alice, False)
    user_set_admin(bob, True)
    user_set_admin(alice, False)
    alice.refresh_from_db()
    assert not alice.is_admin


def test_an_admin_who_is_switched_off_does_not_count_as_one(alice: User, bob: User) -> None:
    user_set_admin(bob, True)
    user_set_active(bob, False)
    with pytest.raises(Conflict, match="last admin"):
        user_set_active(alice, False)


@pytest.mark.usefixtures("quick_passwords")
def test_an_admin_who_never_chose_a_password_does_not_count_as_one(alice: User, bob: User) -> None:
    user_set_password(alice, PASSWORD)
    user_set_admin(bob, True)
    for change in (user_set_admin, user_set_active):
        with pytest.raises(Conflict, match="last admin"):
            change(alice, False)
    user_set_admin(bob, False)
    user_set_admin(bob, True)
    user_set_password(bob, PASSWORD)
    user_set_admin(alice, False)
    assert [user.username for user in User.objects.filter(is_staff=True)] == ["bob"]


def test_switching_a_member_off_voids_their_open_link(bob: User) -> None:
    token = invite_link_create(bob).split("/")[2]
    user_set_active(bob, False)
    user_set_active(bob, True)
    with pytest.raises(NotFound):
        link_find(token, setup=False)


def test_being_seen_is_written_once_a_minute(
    bob: User, django_assert_num_queries: pytest.FixtureRequest
) -> None:
    with django_assert_num_queries(1):
        user_seen(bob)
        user_seen(bob)
    assert User.objects.get(pk=bob.pk).last_seen_at is not None
