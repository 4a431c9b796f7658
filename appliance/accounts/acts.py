"""What admins do, told to whoever keeps the record.

The record lies in the console, above the apps that act. A listener is called inside the
transaction of the act, so that neither can be there without the other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from appliance.accounts.models import User


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    # None: the server by itself, or a command on its machine.
    by: User | None
    # noun.verb, such as "key.revoke".
    action: str
    target: str
    # A change of settings has {"before": {...}, "after": {...}}.
    detail: Mapping[str, Any]
    # None is now.
    at: datetime | None = None


_listeners: list[Callable[[Act], None]] = []


def acts_listen(listener: Callable[[Act], None]) -> None:
    if listener not in _listeners:
        _listeners.append(listener)


def act_done(
    by: User | None, action: str, target: str, *, at: datetime | None = None, **detail: Any
) -> None:
    act = Act(by=by, action=action, target=target, detail=detail, at=at)
    for listener in _listeners:
        listener(act)
