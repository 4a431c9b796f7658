"""B09: pages of other origins, from a browser."""

from typing import Any

import pytest

from appliance.env import EnvError, env_origins
from appliance.serving.booking import in_db_thread
from tests.appliance.api.asgi_caller import Answer, Caller
from tests.appliance.api.checks import CHAT, GOOD
from tests.appliance.limits import tokens_a_day

PAGE = "https://tools.example"
ASK = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.fixture
def allowed(settings: Any) -> None:
    settings.APPLIANCE_CORS_ORIGINS = frozenset({PAGE})


async def ask_first(caller: Caller, origin: str, asked: dict[str, str] = ASK) -> Answer:
    answer = await caller.send("OPTIONS", CHAT, headers={"origin": origin, **asked}).start()
    return await answer.ended()


def cors_names(headers: dict[str, str]) -> list[str]:
    return [name for name in headers if name.startswith("access-control-")]


@pytest.mark.usefixtures("allowed")
async def test_b09_an_allowed_page_may_ask_first_without_a_key(stranger: Caller) -> None:
    answer = await ask_first(stranger, PAGE)
    assert answer.status == 204
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["vary"] == "Origin"
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(
    "origin",
    ["https://tools.example.evil", "http://tools.example", "https://tools.example:8443", "null"],
)
async def test_b09_other_origins_get_no_header(stranger: Caller, origin: str) -> None:
    answer = await ask_first(stranger, origin)
    assert answer.status in (401, 405)
    assert cors_names(answer.headers) == []
    assert answer.headers["vary"] == "Origin"


async def test_b09_nobody_is_allowed_unless_set(stranger: Caller) -> None:
    answer = await ask_first(stranger, PAGE)
    assert answer.status in (401, 405)
    assert cors_names(answer.headers) == []


@pytest.mark.usefixtures("allowed")
async def test_b09_answers_and_errors_carry_the_headers_too(
    caller: Caller, stranger: Caller, bob: Any
) -> None:
    from_page = {"origin": PAGE}
    answers = [await caller.post(CHAT, GOOD, headers=from_page)]
    answers.append(await stranger.post(CHAT, GOOD, headers=from_page))
    answers.append(await caller.post("/v1/nope", {}, headers=from_page))
    answers.append(await caller.post(CHAT, {**GOOD, "stream": True}, headers=from_page))
    await in_db_thread(lambda: tokens_a_day(bob, 0))
    answers.append(await caller.post(CHAT, GOOD, headers=from_page))
    for answer in answers:
        await answer.ended()
    assert [answer.status for answer in answers] == [200, 401, 404, 200, 429]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["vary"] == "Origin"
        assert "access-control-allow-credentials" not in answer.headers
    assert "Retry-After" in answers[-1].headers["access-control-expose-headers"]


@pytest.mark.usefixtures("allowed")
async def test_b09_odd_header_names_are_not_repeated(stranger: Caller) -> None:
    asked = {**ASK, "access-control-request-headers": "x\r\nset-cookie: a"}
    answer = await ask_first(stranger, PAGE, asked)
    assert answer.status == 204
    assert "access-control-allow-headers" not in answer.headers


@pytest.mark.parametrize(
    "value",
    ["*", "null", "tools.example", "https://*.example", "https://a.example/", "https://A.example"],
)
def test_b09_an_origin_that_no_browser_sends_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("APPLIANCE_CORS_ORIGINS", f"{PAGE},{value}")
    with pytest.raises(EnvError, match="APPLIANCE_CORS_ORIGINS"):
        env_origins("APPLIANCE_CORS_ORIGINS")
    monkeypatch.setenv("APPLIANCE_CORS_ORIGINS", f"{PAGE}, http://localhost:3000")
    assert env_origins("APPLIANCE_CORS_ORIGINS") == [PAGE, "http://localhost:3000"]
