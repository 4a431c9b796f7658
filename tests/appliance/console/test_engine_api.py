"""`/api/engine`: who may see and change the engine, and what a bad change is told."""

import json
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError
from django.test import AsyncClient

from appliance.accounts.models import User
from appliance.api_keys.services import api_key_issue
from appliance.console import api, services
from appliance.console.audit import audit_words
from appliance.console.feed import ConsoleFeed
from appliance.console.models import AuditRecord
from appliance.serving.gateway import gateway_remove
from tests.appliance.console.simulated_backend import SimulatedBackend

URL = "/api/engine"


class Caller:
    """A script with a key, or a browser with a session and CSRF checks on."""

    def __init__(self, key: str | None = None) -> None:
        self.client = AsyncClient(enforce_csrf_checks=True)
        self.headers = {"authorization": f"Bearer {key}"} if key else {}

    async def get(self) -> Any:
        return await self.client.get(URL, headers=self.headers)

    async def patch(
        self, body: object, content_type: str = "application/json", **headers: str
    ) -> Any:
        data = body if isinstance(body, bytes | str) else json.dumps(body)
        sent = {**self.headers, **{k.replace("_", "-"): v for k, v in headers.items()}}
        return await self.client.patch(URL, data, content_type=content_type, headers=sent)


@pytest.fixture
def script(alice: User, feed: ConsoleFeed) -> Caller:
    return Caller(api_key_issue(alice, "ops", ["admin"])[1])


async def browser_of(user: User) -> Caller:
    caller = Caller()
    await caller.client.aforce_login(user)
    return caller


def error(response: Any) -> dict[str, Any]:
    found: dict[str, Any] = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


async def test_an_admin_key_reads_the_state(script: Caller, engine: SimulatedBackend) -> None:
    response = await script.get()
    assert response.status_code == 200
    body = response.json()
    assert body["slots"] == {"requested": 4, "effective": 4, "reason": ""}
    kv = body["kv"]
    assert kv["blocks_used"] + kv["blocks_cached"] + kv["blocks_free"] == kv["blocks_total"] == 512
    assert body["running"] == engine.state()["running"]
    assert response["Cache-Control"] == "no-store"


async def test_an_admin_session_reads_the_state_and_the_version(
    alice: User, feed: ConsoleFeed
) -> None:
    response = await (await browser_of(alice)).get()
    assert response.status_code == 200
    assert len(response.json()["settings_version"]) == 12


async def test_without_key_or_session_nothing_is_told(feed: ConsoleFeed) -> None:
    for response in (await Caller().get(), await Caller().patch({"slots": 3})):
        assert response.status_code == 401
        assert error(response)["code"] == "invalid_api_key"
        assert "location" not in response.headers


async def test_a_member_and_a_key_without_the_scope_are_refused(
    bob: User, alice: User, engine: SimulatedBackend, feed: ConsoleFeed
) -> None:
    chat_key = await _issue(alice, ["chat", "models"])
    for caller in (await browser_of(bob), Caller(chat_key)):
        for response in (await caller.get(), await caller.patch({"slots": 3})):
            assert response.status_code == 403
            assert error(response)["code"] == "not_allowed"
    assert engine.state()["slots"]["requested"] == 4


async def test_a_wrong_key_does_not_fall_back_to_the_session(
    alice: User, feed: ConsoleFeed
) -> None:
    caller = await browser_of(alice)
    caller.headers["authorization"] = "Bearer bh_wrong"
    assert (await caller.get()).status_code == 401


async def test_a_change_holds_at_once_and_is_audited(
    script: Caller, engine: SimulatedBackend, feed: ConsoleFeed
) -> None:
    response = await script.patch({"slots": 3})
    assert response.status_code == 200
    assert response.json()["slots"]["effective"] == engine.state()["slots"]["effective"] == 3
    record = await AuditRecord.objects.aget()
    assert (record.actor_name, record.action, record.target) == ("alice", "engine.tune", "slots")
    assert record.detail == {"before": {"slots": 4}, "after": {"slots": 3}}
    await feed.look()
    assert "alice changed parallel slots: 4 → 3." in _event_texts(feed)


async def test_a_change_may_say_why(script: Caller, engine: SimulatedBackend) -> None:
    assert (await script.patch({"slots": 3, "why": " fewer people on Mondays "})).status_code == 200
    record = await AuditRecord.objects.aget()
    assert record.detail["after"] == {"slots": 3}
    assert audit_words(record) == "Tuned: Parallel slots 4 → 3 (fewer people on Mondays)"
    for bad in (7, "two\nlines", "x" * 201):
        refused = await script.patch({"slots": 2, "why": bad})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "why"
    # A reason alone changes nothing.
    assert (await script.patch({"why": "no reason"})).status_code == 400
    assert engine.state()["slots"]["effective"] == 3


async def test_the_longest_answer_of_the_chat_is_tuned_with_the_rest(
    script: Caller, engine: SimulatedBackend, feed: ConsoleFeed
) -> None:
    before = (await script.get()).json()
    assert before["settings"]["chat_max_tokens"]["requested"] == 2048
    changed = (await script.patch({"chat_max_tokens": 512, "slots": 3})).json()
    assert changed["settings"]["chat_max_tokens"]["effective"] == 512
    assert changed["settings_version"] != before["settings_version"]
    record = await AuditRecord.objects.aget()
    assert record.detail["before"] == {"chat_max_tokens": 2048, "slots": 4}
    assert "Longest answer in the chat 2,048 → 512" in audit_words(record)
    refused = await script.patch({"chat_max_tokens": 1})
    assert refused.status_code == 400
    assert error(refused)["param"] == "chat_max_tokens"


async def test_a_value_that_is_as_it_was_is_no_act(script: Caller, feed: ConsoleFeed) -> None:
    assert (await script.patch({"slots": 4})).status_code == 200
    assert not await AuditRecord.objects.aexists()
    assert (await script.patch({"slots": 4, "aging_s": 30.0})).status_code == 200
    assert (await AuditRecord.objects.aget()).detail["after"] == {"aging_s": 30.0}
    await feed.look()
    assert not [text for text in _event_texts(feed) if "parallel slots" in text]


async def test_a_change_is_told_once_also_when_the_engines_own_event_is_seen_first(
    script: Caller, feed: ConsoleFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = services.engine_tune

    async def tuned_and_seen(*given: Any) -> Any:
        state = await real(*given)
        await feed.look()
        return state

    monkeypatch.setattr(services, "engine_tune", tuned_and_seen)
    await feed.look()
    await script.patch({"slots": 3})
    await feed.look()
    told = [text for text in _event_texts(feed) if "slots" in text.lower()]
    assert told == ["alice changed parallel slots: 4 → 3."]


@pytest.mark.parametrize(
    "body",
    [
        {"slots": 0}, {"slots": -1}, {"slots": 4097}, {"slots": "3"}, {"slots": None},
        {"slots": True}, {"slots": 2.5}, {"slots": [3]}, {"slotz": 3}, {"slots": 3, "x": 1}, {},
    ],
)  # fmt: skip
async def test_a_bad_value_or_name_is_400_and_changes_nothing(
    script: Caller, engine: SimulatedBackend, body: dict[str, Any]
) -> None:
    response = await script.patch(body)
    assert response.status_code == 400
    message = error(response)["message"]
    assert "slots" in message
    assert engine.state()["slots"]["requested"] == 4
    assert not await AuditRecord.objects.aexists()


@pytest.mark.parametrize("where", ["api_key_authenticate", "engine_change"])
async def test_a_database_that_takes_nothing_is_503_as_json(
    script: Caller, engine: SimulatedBackend, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OperationalError("database or disk is full")

    monkeypatch.setattr(api, where, refuse)
    response = await script.patch({"slots": 3})
    assert response.status_code == 503
    assert error(response)["code"] == "storage_unavailable"
    assert int(response["Retry-After"]) > 0


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"null", b"5", b'"slots"', b"\xff\xfe", b"", b"x" * 20_000]
)
async def test_a_body_that_is_no_json_object_is_400(script: Caller, body: bytes) -> None:
    response = await script.patch(body)
    assert response.status_code == 400
    assert error(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
async def test_c22_only_json_content_is_read(
    script: Caller, engine: SimulatedBackend, content_type: str
) -> None:
    response = await script.patch(b'{"slots": 3}', content_type=content_type)
    assert response.status_code == 400
    assert "application/json" in error(response)["message"]
    assert engine.state()["slots"]["requested"] == 4


async def test_c22_a_session_needs_the_csrf_token(
    alice: User, engine: SimulatedBackend, feed: ConsoleFeed
) -> None:
    caller = await browser_of(alice)
    response = await caller.patch({"slots": 3})
    assert response.status_code == 403
    assert "CSRF" in error(response)["message"]
    page = await caller.client.get("/console/")
    token = page.context["csrf_token"]
    assert (await caller.patch({"slots": 3}, x_csrftoken=str(token))).status_code == 200
    assert engine.state()["slots"]["requested"] == 3


async def test_two_admins_cannot_overwrite_each_other_unseen(
    script: Caller, engine: SimulatedBackend
) -> None:
    seen = (await script.get()).json()["settings_version"]
    assert (await script.patch({"slots": 6}, if_match=f'"{seen}"')).status_code == 200
    late = await script.patch({"slots": 2}, if_match=f'"{seen}"')
    assert late.status_code == 409
    assert error(late)["code"] == "conflict"
    assert engine.state()["slots"]["requested"] == 6
    newer = (await script.get()).json()["settings_version"]
    assert (await script.patch({"slots": 2}, if_match=f'"{newer}"')).status_code == 200


async def test_other_methods_are_405(script: Caller) -> None:
    for method in ("post", "put", "delete"):
        call = getattr(script.client, method)
        response = await call(URL, b"{}", content_type="application/json", headers=script.headers)
        assert response.status_code == 405
        assert response["Allow"] == "GET, HEAD, PATCH"
        assert "GET and PATCH" in error(response)["message"]


async def test_without_an_engine_it_is_503(script: Caller, engine: SimulatedBackend) -> None:
    gateway_remove()
    for response in (await script.get(), await script.patch({"slots": 3})):
        assert response.status_code == 503
        assert error(response)["code"] == "engine_unavailable"


async def _issue(owner: User, scopes: list[str]) -> str:
    return (await sync_to_async(api_key_issue)(owner, "scripts", scopes))[1]


def _event_texts(feed: ConsoleFeed) -> list[str]:
    return [event[4] for event in feed.picture.delta_since(-1).get("events", [])]
