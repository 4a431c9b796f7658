"""What an admin tunes holds at once and after the next start."""

import pytest
from channels.db import database_sync_to_async

from appliance.accounts.services import user_create
from appliance.errors import BadRequest, EngineUnavailable
from appliance.serving.chat_settings import (
    DEFAULTS,
    chat_setting,
    chat_settings_apply,
    chat_settings_shown,
)
from appliance.serving.gateway import gateway_remove
from appliance.serving.live_settings import apply_saved, saved_settings
from appliance.serving.models import EngineSetting
from appliance.serving.services import engine_tune
from tests.appliance.fake_backend import FakeBackend

pytestmark = pytest.mark.django_db(transaction=True)

saved = database_sync_to_async(saved_settings)


async def test_a_change_is_applied_and_kept(backend, transactional_db):
    alice = await database_sync_to_async(user_create)("alice", is_admin=True)
    state = await engine_tune({"slots": 3}, alice)
    assert state["slots"]["requested"] == 3
    await engine_tune({"slots": 7}, alice)
    setting = await database_sync_to_async(EngineSetting.objects.get)()
    assert (setting.value, setting.version, setting.changed_by_id) == (7, 2, alice.pk)

    fresh = FakeBackend()
    apply_saved(fresh, await saved())
    assert fresh.settings["slots"] == 7


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": 0},
        {"slots": "many"},
        {"no_such": 1},
        {"slots": 0, "chat_max_tokens": 100},
        {"slots": 5, "chat_max_tokens": 15},
        {"chat_max_tokens": "auto"},
        {"chat_max_tokens": True},
        {"chat_max_tokens": 1_000_001},
    ],
)
async def test_a_bad_value_changes_nothing(backend, changes):
    with pytest.raises(BadRequest) as refused:
        await engine_tune(changes, None)
    assert any(name in refused.value.message for name in changes)
    assert await saved() == {}
    assert backend.settings["slots"] == 4
    assert chat_setting("chat_max_tokens") == DEFAULTS["chat_max_tokens"]


async def test_the_chats_settings_are_kept_beside_the_engines_which_never_sees_them(backend):
    await engine_tune({"slots": 3, "chat_max_tokens": 100}, None)
    assert backend.settings == {"slots": 3}
    assert await saved() == {"slots": 3, "chat_max_tokens": 100}
    chat_settings_apply(DEFAULTS)
    apply_saved(FakeBackend(), await saved())
    assert chat_setting("chat_max_tokens") == 100


def test_a_longest_answer_over_the_context_says_what_holds():
    chat_settings_apply({"chat_max_tokens": 5000})
    shown = chat_settings_shown({"context_tokens": 4096})["chat_max_tokens"]
    assert (shown["requested"], shown["effective"]) == (5000, 4096)
    assert "context limit" in shown["reason"]
    assert chat_settings_shown({"context_tokens": 8192})["chat_max_tokens"]["reason"] == ""


async def test_a_saved_value_that_no_longer_fits_is_left_out(caplog):
    backend = FakeBackend()
    apply_saved(backend, {"gone": 1, "slots": 9})
    assert backend.settings["slots"] == 9
    assert "gone" in caplog.text


async def test_without_an_engine_nothing_is_kept():
    gateway_remove()
    with pytest.raises(EngineUnavailable):
        await engine_tune({"slots": 2}, None)
    assert await saved() == {}
