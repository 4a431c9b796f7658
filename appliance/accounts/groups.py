"""Groups of members, so that one limit can hold for several: Django's own groups."""

from collections.abc import Collection

from django.contrib.auth.models import Group
from django.db import transaction
from django.db.models import Prefetch, QuerySet

from appliance.accounts.acts import act_done
from appliance.accounts.models import User
from appliance.errors import BadRequest, Conflict, NotFound

MAX_NAME = 80


def groups() -> QuerySet[Group]:
    """All groups by name, with their members loaded."""
    by_name = Prefetch("user_set", User.objects.order_by("username"))
    return Group.objects.order_by("name").prefetch_related(by_name)


def group_get(group_id: int) -> Group:
    group = Group.objects.filter(pk=group_id).first()
    if group is None:
        raise NotFound("This group is gone: somebody deleted it.")
    return group


def group_create(name: str, *, by: User | None) -> Group:
    """Raises BadRequest for a name that is not allowed, Conflict for one that is taken."""
    name = name.strip()
    if not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise BadRequest(f"A group needs a name of 1 to {MAX_NAME} letters.", param="name")
    with transaction.atomic():
        if Group.objects.filter(name__iexact=name).exists():
            raise Conflict(f"There is a group {name} already.", param="name")
        group = Group.objects.create(name=name)
        act_done(by, "group.create", name)
    return group


def group_set_members(group: Group, user_ids: Collection[int], *, by: User | None) -> None:
    """Exactly these members from now on; the rules for the group hold for them at once."""
    with transaction.atomic():
        before = sorted(group.user_set.values_list("username", flat=True))
        group.user_set.set(User.objects.filter(pk__in=user_ids))
        after = sorted(group.user_set.values_list("username", flat=True))
        if before != after:
            members = {"before": {"members": before}, "after": {"members": after}}
            act_done(by, "group.members", group.name, **members)


def group_delete(group: Group, *, by: User | None) -> None:
    """Delete it with the limits that hold for it. Its members stay."""
    with transaction.atomic():
        act_done(by, "group.delete", group.name)
        group.delete()
