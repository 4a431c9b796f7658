"""Limits for tests in one line."""

from typing import Any

from appliance.accounts.models import User
from appliance.quotas.models import LimitRule
from appliance.quotas.rules import limit_rule_save


def only_limit(limit: str, value: int, **subject: Any) -> None:
    """The one rule there is from here on; for everybody unless a subject is given."""
    LimitRule.objects.all().delete()
    limit_rule_save(limit, value, by=None, **subject)


def tokens_a_day(user: User | None, tokens: int | None) -> None:
    """The one rule there is from here on; None tokens is no rule at all."""
    LimitRule.objects.all().delete()
    if tokens is not None:
        limit_rule_save("tokens_per_day", tokens, user=user, by=None)
