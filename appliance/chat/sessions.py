"""Which signed-in sessions have ended, by sign-out, expiry, a new password or a closed account."""

from collections.abc import Iterable
from importlib import import_module

from django.conf import settings
from django.contrib.auth import HASH_SESSION_KEY, SESSION_KEY
from django.utils.crypto import constant_time_compare

from appliance.accounts.models import User


def sessions_ended(sessions: Iterable[tuple[int, str]]) -> set[tuple[int, str]]:
    """Those of the (user id, session key) pairs that would not be let in any more."""
    pairs = set(sessions)
    store = import_module(settings.SESSION_ENGINE).SessionStore
    users = User.objects.filter(is_active=True).in_bulk({user_id for user_id, _ in pairs})
    ended = set()
    for user_id, session_key in pairs:
        user = users.get(user_id)
        data = store(session_key).load() if user is not None else {}
        if (
            user is None
            or data.get(SESSION_KEY) != str(user_id)
            or not constant_time_compare(
                data.get(HASH_SESSION_KEY, ""), user.get_session_auth_hash()
            )
        ):
            ended.add((user_id, session_key))
    return ended
