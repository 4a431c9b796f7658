from typing import Any

from tests.appliance.api.asgi_caller import Answer

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello there"}]
GOOD = {"model": "scripted", "messages": MESSAGES}


async def check_error(
    answer: Answer, status: int, code: str, *, param: str | None = None
) -> dict[str, Any]:
    body = await answer.json()
    assert answer.headers["content-type"] == "application/json"
    assert (answer.status, body["error"]["code"]) == (status, code)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert body["error"]["param"] == param
    return body["error"]
