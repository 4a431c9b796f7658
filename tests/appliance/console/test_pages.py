"""The console's page and its one act on requests: killing one."""

from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.test import AsyncClient, Client

from appliance.accounts.models import User
from appliance.console.event_words import KILLED
from appliance.console.feed import ConsoleFeed
from appliance.console.models import AuditRecord
from tests.appliance.console.simulated_backend import SimulatedBackend


async def signed_in(user: User, *, csrf: bool = False) -> AsyncClient:
    client = AsyncClient(enforce_csrf_checks=csrf)
    await client.aforce_login(user)
    return client


async def kill(client: AsyncClient, request_id: str) -> Any:
    return await client.post(f"/console/requests/{request_id}/kill/")


def test_an_admin_gets_the_page_with_the_summary_for_those_who_see_no_canvas(
    alice: User,
) -> None:
    client = Client(headers={"host": "localhost"})
    client.force_login(alice)
    page = client.get("/console/")
    assert page.status_code == 200
    html = page.content.decode()
    for part in ('id="block-summary"', 'id="slots-requested"', 'id="slots-effective"'):
        assert part in html
    # The policy forbids both, so neither may be needed.
    assert "<style" not in html
    assert "style=" not in html
    assert html.count("<script") == html.count("<script src=") + html.count(
        '<script type="module" src='
    )
    assert "script-src 'self'" in page["Content-Security-Policy"]


def test_a_member_and_a_visitor_do_not_get_the_page(
    bob: User, caplog: pytest.LogCaptureFixture
) -> None:
    client = Client(headers={"host": "localhost"})
    assert client.get("/console/").status_code == 302
    client.force_login(bob)
    assert client.get("/console/").status_code == 403
    (said,) = (record for record in caplog.records if record.name == "django.request")
    assert (said.levelname, said.exc_info) == ("WARNING", None)


async def test_killing_ends_the_request_is_audited_and_told_to_all_consoles(
    alice: User, engine: SimulatedBackend, feed: ConsoleFeed
) -> None:
    await feed.look()
    info = engine.state()["requests"][0]
    response = await kill(await signed_in(alice), info["request_id"])
    assert response.status_code == 204
    assert info["request_id"] not in {r["request_id"] for r in engine.state()["requests"]}
    assert engine.events_since(0)[-1]["data"]["detail"] == KILLED == "An admin stopped this answer."
    record = await AuditRecord.objects.aget()
    assert (record.actor_name, record.action) == ("alice", "request.kill")
    assert record.target == info["request_id"]
    assert record.detail["owner"] == info["labels"]["username"]
    await feed.look()
    texts = [event[4] for event in feed.picture.delta_since(-1)["events"]]
    owner = info["labels"]["username"]
    assert any(text.startswith(f"alice killed {owner}'s request") for text in texts)


async def test_killing_what_has_ended_is_404_and_not_audited(
    alice: User, feed: ConsoleFeed
) -> None:
    client = await signed_in(alice)
    for request_id in ("r-fff", "x" * 300):
        response = await kill(client, request_id)
        assert response.status_code == 404
        assert "has ended" in response.json()["error"]["message"]
    assert not await AuditRecord.objects.aexists()


@pytest.mark.parametrize("who", ["visitor", "member", "admin without a token"])
async def test_c04_only_an_admin_with_a_token_can_kill(
    alice: User, bob: User, engine: SimulatedBackend, feed: ConsoleFeed, who: str
) -> None:
    request_id = engine.state()["requests"][0]["request_id"]
    client = AsyncClient()
    if who == "member":
        client = await signed_in(bob)
    if who == "admin without a token":
        client = await signed_in(alice, csrf=True)
    response = await kill(client, request_id)
    assert response.status_code == (302 if who == "visitor" else 403)
    assert request_id in {r["request_id"] for r in engine.state()["requests"]}


async def test_killing_by_get_is_refused(alice: User, feed: ConsoleFeed) -> None:
    client = await signed_in(alice)
    assert (await client.get("/console/requests/r-1/kill/")).status_code == 405


async def test_the_audit_outlives_the_account(
    alice: User, engine: SimulatedBackend, feed: ConsoleFeed
) -> None:
    request_id = engine.state()["requests"][0]["request_id"]
    await kill(await signed_in(alice), request_id)
    await sync_to_async(alice.delete)()
    record = await AuditRecord.objects.aget()
    assert (record.actor_id, record.actor_name) == (None, "alice")
