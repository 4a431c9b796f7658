"""What ends answers from outside the chat: signing out, and the end of the server.

A session that ends in another way is noticed by `Generations.check_sessions`. The imports are
late: commands that never serve have no use for sockets and answers.
"""

from typing import Any

from django.http import HttpRequest


def session_signed_out(sender: object, request: HttpRequest | None = None, **kwargs: Any) -> None:
    """Receives Django's own signal: sockets and answers of that session end at once."""
    from appliance.chat.generations import generations

    session = getattr(request, "session", None)
    if session is not None and session.session_key:
        generations.session_ended(session.session_key)


async def finish_answers() -> None:
    """Store what is written of the answers that still run."""
    from appliance.chat.generations import generations

    await generations.shutdown()
