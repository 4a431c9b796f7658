"""The team of the tests: Alice is an admin, Bob a member, Charlie a member of another group.

They have no password: tests sign them in with `client.force_login`. Tests of passwords set one.
"""

from django.contrib.auth.models import Group

from appliance.accounts.models import User
from appliance.accounts.services import user_create

PASSWORD = "nine-Lanterns-burn"


def make_alice() -> User:
    return user_create("alice", is_admin=True)


def make_bob() -> User:
    return user_create("bob")


def make_charlie() -> User:
    charlie = user_create("charlie")
    charlie.groups.add(Group.objects.get_or_create(name="other team")[0])
    return charlie
