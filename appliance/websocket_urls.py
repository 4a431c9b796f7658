"""All websocket routes."""

from typing import Any

from django.urls import re_path

from appliance.chat.websocket_urls import urlpatterns as chat_patterns
from appliance.console.websocket_urls import urlpatterns as console_patterns

CLOSE_NO_SUCH_SOCKET = 4404


async def no_such_socket(scope: Any, receive: Any, send: Any) -> None:
    """Refuse before accept: a router without a match raises, and anyone could fill the log."""
    await receive()
    await send({"type": "websocket.close", "code": CLOSE_NO_SUCH_SOCKET})


urlpatterns = [*chat_patterns, *console_patterns, re_path(r"", no_such_socket)]
