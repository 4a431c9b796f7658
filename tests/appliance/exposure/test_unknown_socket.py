"""A socket that does not exist is refused before accept, without a traceback."""

import pytest
from channels.testing import WebsocketCommunicator

from appliance.asgi import application
from appliance.websocket_urls import CLOSE_NO_SUCH_SOCKET


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("path", ["/ws/nope/", "/ws/chat", "/", "/ws/", "/%2e%2e/ws/chat/"])
async def test_unknown_paths_are_refused(path: str) -> None:
    headers = [(b"host", b"localhost"), (b"origin", b"http://localhost")]
    socket = WebsocketCommunicator(application, path, headers=headers)
    accepted, code = await socket.connect(timeout=10)
    assert (accepted, code) == (False, CLOSE_NO_SUCH_SOCKET)
    await socket.wait(timeout=10)
