"""The rules that admins set, and which of them hold for a caller. Blocking."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.contrib.auth.models import Group
from django.db import IntegrityError, transaction
from django.db.models import Q

from appliance.accounts.acts import act_done
from appliance.accounts.models import User
from appliance.errors import BadRequest, Conflict, NotFound
from appliance.quotas.limits import LIMIT_KINDS, MAX_WAIT_S, LimitKind
from appliance.quotas.models import LimitRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A rule as it holds for one caller."""

    name: str
    value: int
    wait_s: int
    # Whom the rule is for, in words.
    who: str
    # Counted for the key alone; else for the user with all their keys and chats.
    of_key: bool = False

    @property
    def kind(self) -> LimitKind:
        return LIMIT_KINDS[self.name]

    @property
    def words(self) -> str:
        """`20 requests a minute (rule for everybody)`."""
        return f"{self.kind.words(self.value)} (rule for {self.who})"


def limits_of(user_id: int, key_id: int | None = None) -> list[Limit]:
    """All rules that hold for this user, or for requests with this key; the tightest first."""
    mine = Q(group=None, user=None, key=None) | Q(user_id=user_id)
    mine |= Q(group__in=Group.objects.filter(user=user_id))
    if key_id is not None:
        mine |= Q(key_id=key_id)
    rules = LimitRule.objects.filter(mine).select_related("group", "user", "key")
    return [limit_from(rule) for rule in rules.order_by("limit", "value", "pk")]


def limit_from(rule: LimitRule) -> Limit:
    return Limit(
        name=rule.limit,
        value=rule.value,
        wait_s=rule.wait_s,
        who=rule.who,
        of_key=rule.key_id is not None,
    )


def limit_rule_save(
    limit: str,
    value: int,
    *,
    by: User | None,
    wait_s: int = 0,
    group: Group | None = None,
    user: User | None = None,
    key: Any = None,
    on_record: bool = True,
) -> LimitRule:
    """Make the rule of one subject (none of the three is everybody), or change the one it has.

    It counts at once, also for the minute, day and month that run. Without `on_record` it is no act
    of an admin.

    Raises:
        BadRequest: an unknown limit, or a value or wait out of range.
    """
    _check(limit, value, wait_s)
    subject = {"group": group, "user": user, "key": key}
    try:
        with transaction.atomic():
            # Several members may be in a hurry: only one may find nothing.
            rule = LimitRule.objects.select_for_update().filter(limit=limit, **subject).first()
            before = None if rule is None else _fields(rule)
            rule = rule or LimitRule(limit=limit, **subject)
            rule.value, rule.wait_s, rule.changed_by = value, wait_s, by
            rule.save()
            after = _fields(rule)
            if not on_record:
                return rule
            if before is None:
                act_done(by, "limit.add", rule.who, before={limit: None}, after=after)
            elif before != after:
                # That it no longer waits is a change too.
                both = dict.fromkeys([*before, *after])
                after = {name: after.get(name, 0) for name in both}
                act_done(by, "limit.change", rule.who, before=before, after=after)
    except IntegrityError as exc:
        raise Conflict("Somebody made this rule at the same moment. Look at it first.") from exc
    return rule


# What owners may limit their own keys by.
KEY_LIMITS = ("requests_per_minute", "tokens_per_day")


def own_key_limits(key: Any) -> dict[str, int | None]:
    """Values of the rules on the key itself that its owner may set; None where there is none."""
    rules = dict(LimitRule.objects.filter(key=key).values_list("limit", "value"))
    return {name: rules.get(name) for name in KEY_LIMITS}


def limit_rules_of_key(key: Any) -> list[str]:
    """The limits on the key itself, in words."""
    rules = LimitRule.objects.filter(key=key).order_by("limit")
    return [LIMIT_KINDS[rule.limit].words(rule.value) for rule in rules]


def own_key_limits_set(owner: User, key: Any, values: Mapping[str, int | None]) -> None:
    """The owner of `key` limits it, or with None lifts the own limit again.

    Raises:
        Conflict: an admin set that limit; it stays.
        BadRequest: a value out of range, or a limit that owners do not set.
    """
    with transaction.atomic():
        for name, value in values.items():
            if name not in KEY_LIMITS:
                raise BadRequest(f"There is no {name!r} to set here.", param=name)
            rule = LimitRule.objects.select_for_update().filter(limit=name, key=key).first()
            if (None if rule is None else rule.value) == value:
                continue
            if rule is not None and rule.changed_by_id != owner.pk:
                raise Conflict("An admin set this limit. Ask them to change it.", param=name)
            if rule is not None and value is None:
                rule.delete()
            elif value is not None:
                limit_rule_save(name, value, key=key, by=owner, on_record=False)


def limit_rule_get(rule_id: int) -> LimitRule:
    rules = LimitRule.objects.select_related("group", "user", "key")
    rule = rules.filter(pk=rule_id).first()
    if rule is None:
        raise NotFound("This rule is gone: somebody deleted it.")
    return rule


def limit_rule_delete(rule: LimitRule, *, by: User | None) -> None:
    with transaction.atomic():
        before = _fields(rule)
        if LimitRule.objects.filter(pk=rule.pk).delete()[0]:
            act_done(by, "limit.delete", rule.who, before=before, after={rule.limit: None})


def _fields(rule: LimitRule) -> dict[str, Any]:
    return {rule.limit: rule.value} | ({"wait_s": rule.wait_s} if rule.wait_s else {})


def _check(limit: str, value: int, wait_s: int) -> None:
    kind = LIMIT_KINDS.get(limit)
    if kind is None:
        raise BadRequest(f"There is no limit {limit!r}: {', '.join(LIMIT_KINDS)}.", param="limit")
    if not _is_whole(value, kind.low, kind.high):
        raise BadRequest(
            f"{limit} is {value!r}; a whole number from {kind.low:,} to {kind.high:,} is allowed.",
            param="value",
        )
    if not _is_whole(wait_s, 0, MAX_WAIT_S):
        raise BadRequest(
            f"The wait is {wait_s!r}; 0 to {MAX_WAIT_S} seconds are allowed.", param="wait_s"
        )
    if wait_s and not kind.can_wait:
        raise BadRequest(
            f"Waiting does not help with {kind.unit}: the turn would come too late. "
            "Let the rule refuse.",
            param="wait_s",
        )


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
