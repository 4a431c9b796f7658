"""Signing out reaches this process's sockets and answers at once, through Django's own signal.

A session that ends in another way is noticed by `Generations.check_sessions`.
"""

from typing import Any

from django.http import HttpRequest


def end_session(sender: object, request: HttpRequest | None = None, **kwargs: Any) -> None:
    # Imported late: commands that never serve have no use for the sockets.
    from appliance.chat.generations import generations

    session = getattr(request, "session", None)
    if session is not None and session.session_key:
        generations.session_ended(session.session_key)
