"""The tuning page: all live settings in words, the preview's arithmetic, and history."""

import uuid
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import pytest
from django.test import AsyncClient
from django.utils import timezone

from appliance.accounts.models import User
from appliance.console.feed import ConsoleFeed
from appliance.console.models import ShareWeight
from appliance.console.replay import Past, Rules, past_requests, replay
from appliance.console.replay_rules import replay_rules
from appliance.console.request_log import RequestLog
from appliance.console.services import engine_change
from appliance.console.setting_catalogue import FIELDS
from appliance.quotas.models import UsageRecord
from appliance.serving.chat_settings import DEFAULTS, chat_settings_check
from appliance.serving.gateway import gateway_remove
from appliance.serving.live_settings import live_state
from inference.scheduling.settings import SchedulerSettings
from inference.scheduling.settings import check_changes as engine_check
from tests.appliance.console.simulated_backend import SimulatedBackend
from tests.appliance.console.test_request_log import info

URL = "/console/tuning/"


@pytest.fixture
async def admin(alice: User, feed: ConsoleFeed) -> AsyncClient:
    client = AsyncClient()
    await client.aforce_login(alice)
    return client


def test_every_field_is_a_setting_and_its_ends_are_allowed() -> None:
    defaults = asdict(SchedulerSettings()) | DEFAULTS
    for field in FIELDS:
        check_changes = chat_settings_check if field.name in DEFAULTS else engine_check
        check_changes({field.name: defaults[field.name]})
        if field.kind == "number":
            whole = field.step >= 1
            for end in (field.low, field.high):
                check_changes({field.name: int(end) if whole else float(end)})
            assert field.low <= field.slider_high <= field.high
        values: list[Any] = [value for value, _words in field.choices]
        if field.kind == "shares":
            values = [dict.fromkeys(values, end) for end in (field.low, field.high)]
        for value in values:
            check_changes({field.name: value})
        if field.word:
            check_changes({field.name: field.word})


async def test_all_settings_are_shown_with_what_they_do(
    admin: AsyncClient, engine: SimulatedBackend
) -> None:
    html = (await admin.get(URL)).content.decode()
    for name in ("slots", *live_state(engine)["settings"]):
        assert f'data-setting="{name}"' in html
    assert "style=" not in html


async def test_the_history_says_who_changed_what_and_can_take_it_back(
    admin: AsyncClient, alice: User, feed: ConsoleFeed
) -> None:
    await engine_change({"slots": 6, "enable_prefix_cache": False}, alice)
    response = await admin.get(URL)
    (change,) = response.context["history"]
    assert change["who"] == "alice"
    assert change["words"] == "Parallel slots 4 → 6; Prefix cache on → off"
    assert change["back"] == '{"slots":4,"enable_prefix_cache":true}'
    assert b"Go back to before" in response.content


async def test_members_and_groups_can_get_a_weight_there(
    admin: AsyncClient, bob: User, engine: SimulatedBackend
) -> None:
    await ShareWeight.objects.acreate(user=bob, weight=2.5)
    html = (await admin.get(URL)).content.decode()
    assert f'<option value="user:{bob.pk}">bob</option>' in html
    assert '<td>bob</td><td class="r">2.50</td>' in html


async def test_only_admins_see_tuning(bob: User, feed: ConsoleFeed) -> None:
    client = AsyncClient()
    for url in (URL, f"{URL}replay/?slots=4"):
        assert (await client.get(url)).status_code == 302
    await client.aforce_login(bob)
    for url in (URL, f"{URL}replay/?slots=4"):
        assert (await client.get(url)).status_code == 403


async def test_without_an_engine_the_page_says_so(admin: AsyncClient) -> None:
    gateway_remove()
    response = await admin.get(URL)
    assert response.status_code == 200
    assert b"There is no engine to tune." in response.content


async def test_the_replay_answers_for_the_requests_that_the_console_saw(
    admin: AsyncClient, engine: SimulatedBackend, feed: ConsoleFeed
) -> None:
    await feed.look()
    many = (await admin.get(f"{URL}replay/", {"slots": 64})).json()
    # Those that run, and those that were started and then preempted.
    assert many["requests"] >= engine.state()["running"] > 0
    assert many["requests"] == many["fitted"] + many["waited"] + many["refused"]
    tight = (await admin.get(f"{URL}replay/", {"slots": 64, "max_model_len": 64})).json()
    assert tight["refused"] == tight["requests"] == many["requests"]


async def test_the_replay_adds_what_the_ledger_knows_of_the_hour(
    admin: AsyncClient, alice: User, engine: SimulatedBackend, feed: ConsoleFeed
) -> None:
    """After a restart the last hour is the ledger's; a request in both counts once."""
    await feed.look()
    before = (await admin.get(f"{URL}replay/")).json()["requests"]
    known = engine.state()["requests"][0]["request_id"]
    for number, request_id in enumerate(("r-gone-1", "r-gone-2", known)):
        await UsageRecord.objects.acreate(
            reservation_id=uuid.uuid4(),
            request_id=request_id,
            user=alice,
            username="alice",
            source="chat",
            model="m",
            prompt_tokens=100,
            cached_tokens=0,
            completion_tokens=20 + number,
            queue_s=0.5,
            ttft_s=1.0,
            duration_s=4.0,
            end="stop",
            day=timezone.localdate(),
        )
    old = UsageRecord.objects.filter(request_id="r-gone-2")
    await old.aupdate(created_at=timezone.now() - timedelta(hours=2))
    assert (await admin.get(f"{URL}replay/")).json()["requests"] == before + 1


@pytest.mark.parametrize("slots", ["0", "", "x", "-1", "4097", "٣", "1" * 500])
async def test_a_bad_number_in_the_replay_is_400(admin: AsyncClient, slots: str) -> None:
    response = await admin.get(f"{URL}replay/", {"slots": slots})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "slots")


async def test_a_setting_that_no_replay_knows_is_400(admin: AsyncClient) -> None:
    for name, value in (("policy", "static"), ("admission_headroom", "0.95"), ("x" * 99, "1")):
        response = await admin.get(f"{URL}replay/", {name: value})
        assert response.status_code == 400


def test_what_is_not_asked_for_is_as_it_is_now() -> None:
    state = SimulatedBackend([("1", "alice")], total=4096, slots=12).state()
    now = Rules(slots=12, reserved=2, context_tokens=16_384, blocks=4096, block_size=16)
    assert replay_rules(state, {}) == now
    assert replay_rules(state, {"slots": "auto"}) == now
    asked = replay_rules(state, {"admission_headroom": "0.25", "max_running_per_owner": "3"})
    assert (asked.headroom, asked.per_owner, asked.slots) == (0.25, 3, 12)
    # Half of the share is half of the blocks; "auto" is the pool as it is.
    assert replay_rules(state, {"kv_memory_share": "0.2"}).blocks == 2048
    assert replay_rules(state, {"kv_memory_share": "auto"}).blocks == 4096


def at_once(*lengths: float, is_interactive: bool = True) -> list[Past]:
    return [Past(0.0, length, is_interactive) for length in lengths]


def test_the_replay_of_the_founding_example() -> None:
    """Four slots, replies of 40, 180, 80 and 120, then 140, 100 and 60: all end at 180."""
    outcome = replay(at_once(40, 180, 80, 120, 140, 100, 60), Rules(slots=4))
    assert (outcome.requests, outcome.fitted) == (7, 4)
    assert (outcome.waited, outcome.longest_s) == (3, 120.0)
    assert replay(at_once(40, 180, 80, 120), Rules(slots=4)).waited == 0


def test_slots_kept_for_chat_make_scripts_wait_and_people_not() -> None:
    scripts = at_once(10, 10, is_interactive=False)
    assert replay(scripts, Rules(slots=2, reserved=1)).longest_s == 10.0
    people = [*scripts, Past(1.0, 10, True)]
    assert replay(people, Rules(slots=2, reserved=1)).waited == 1
    # One slot is always left for the others, else they would never start.
    assert replay(scripts, Rules(slots=1, reserved=5)).requests == 2


def test_the_memory_decides_who_fits_by_whole_blocks() -> None:
    """Three of 412, 96 and 1,310 tokens take 26 + 6 + 82 = 114 blocks."""
    three = [Past(0.0, 10.0, True, f"u{n}", n, 0) for n in (412, 96, 1310)]
    assert replay(three, Rules(slots=9, blocks=114)).waited == 0
    assert replay(three, Rules(slots=9, blocks=113)).waited == 1
    assert replay(three, Rules(slots=9, blocks=125, headroom=0.1)).waited == 1
    assert replay(three, Rules(slots=9, blocks=127, headroom=0.1)).waited == 0
    # One that is longer than the whole pool is never served.
    assert replay(three, Rules(slots=9, blocks=80)).refused == 1


def test_a_context_limit_refuses_long_prompts_and_cuts_long_answers() -> None:
    past = [Past(0.0, 1.0, True, "u", prompt, 50) for prompt in (40, 80, 100, 200)]
    outcome = replay(past, Rules(slots=9, context_tokens=100))
    assert (outcome.refused, outcome.cut, outcome.fitted) == (2, 1, 2)
    assert replay(past, Rules(slots=9)).cut == 0


def test_a_users_own_limit_makes_that_user_wait_alone() -> None:
    past = [Past(0.0, 10.0, True, owner) for owner in ("a", "a", "a", "b")]
    outcome = replay(past, Rules(slots=9, per_owner=1))
    assert (outcome.waited, outcome.longest_s) == (2, 20.0)


def test_waiting_and_preempted_time_is_not_counted_as_work() -> None:
    log = RequestLog()
    looks: list[tuple[float, dict[str, Any]]] = [
        (0.0, info(queue_position=0)),
        (2.0, info(state="prefill", slot=0)),
        (3.0, info(state="preempted", queue_position=0)),
        (7.0, info(state="decode", slot=0)),
    ]
    for tick, (now, seen) in enumerate(looks):
        log.observe([seen], 0, now, tick)
    log.observe([], 0, 9.0, 9)
    assert past_requests(log.rows(), 9.0) == [Past(0.0, 3.0, False, "7", 100, 0)]


def test_no_requests_are_no_error() -> None:
    outcome = replay([], Rules(slots=4))
    assert (outcome.requests, outcome.waited, outcome.longest_s, outcome.p95_s) == (0, 0, 0.0, 0.0)


def test_a_request_that_started_this_very_moment_counts() -> None:
    log = RequestLog()
    log.observe([info(state="prefill", slot=0)], 0, 5.0, 0)
    assert [past.took for past in past_requests(log.rows(), 5.0)] == [0.0]
