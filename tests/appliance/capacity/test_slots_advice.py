"""The tuning page answers "what should I set?" from the last test and from what memory carries."""

from datetime import timedelta
from typing import Any

import pytest
from django.template import Context, Template

from appliance.capacity.figures import Level
from appliance.capacity.models import CapacityRun
from appliance.capacity.plan import Plan
from appliance.capacity.services import run_keep
from appliance.capacity.slots_advice import slots_advice
from appliance.console.models import AuditRecord
from tests.appliance.capacity.test_recommend import level as measured

pytestmark = pytest.mark.django_db


def level(users: int, ttft: float = 0.3) -> Level:
    return measured(users, ttft, 0.02, 100.0 + users)


def state(slots: int = 16, requested: Any = 16, blocks: int = 1000, **changes: Any) -> Any:
    return {
        "model": {"name": "small", "context_tokens": 4096},
        "slots": {"requested": requested, "effective": slots, "reason": "enough for its steps"},
        "kv": {"blocks_total": blocks, "block_size": 16},
        "settings": {"max_model_len": {"effective": 1600}},
        **changes,
    }


def ended_test(*levels: Level, model: str = "small", **facts: Any) -> CapacityRun:
    plan = Plan(mix="chat", levels=tuple(one.users for one in levels))
    run_keep(
        plan, levels, {"median_prompt": 1, "median_answer": 1, "model": model, **facts}, by="x"
    )
    return CapacityRun.objects.first()


def told(**changes: Any) -> dict[str, Any]:
    advice = slots_advice(state(**changes))
    assert advice is not None
    return advice


def test_without_a_test_it_says_what_runs_why_and_to_measure() -> None:
    chosen = told(requested="auto")
    assert chosen["title"] == "Leave the slots at auto, 16 now, until you have measured"
    assert chosen["text"].startswith("The server chose 16: enough for its steps.")
    assert told(slots=1)["title"] == "You run 1 slot, and nobody has measured what is best"


def test_a_test_gives_the_number_and_what_speaks_against_more() -> None:
    run = ended_test(level(4), level(8), level(16, ttft=9.0))
    advice = told()
    assert (advice["title"], advice["suggested"], advice["run"]) == ("Set slots to 8", 8, run)
    assert "At 16 the first token takes 9.0 s" in advice["text"]
    assert told(slots=8)["title"] == "Keep 8 slots"
    assert told(slots=8)["suggested"] is None


def test_tests_of_another_model_or_server_do_not_count() -> None:
    ended_test(level(4), server="box.example")
    assert "nobody has measured" in told()["title"]
    ended_test(level(4), model="other")
    advice = told()
    assert not advice["is_measured"]
    assert advice["title"] == "You run 16 slots, not measured with this model"
    assert "The last test was with other and says nothing of this model." in advice["text"]
    assert "was with other" in told(requested="auto")["text"]


def test_other_settings_changed_since_make_it_old_and_its_own_advice_does_not() -> None:
    run = ended_test(level(4), level(8, ttft=9.0))
    later = run.ended_at + timedelta(seconds=1)
    AuditRecord.objects.create(action="engine.tune", target="slots", at=later)
    assert not told()["is_old"]
    AuditRecord.objects.create(action="engine.tune", target="max_model_len, slots", at=later)
    assert told()["is_old"]


def test_memory_is_told_in_answers_and_tokens() -> None:
    assert told()["memory"] == (
        "Memory has room for 1,000 tokens in each of 16 slots, or for 10 answers of the full "
        "1,600. When it is full, the newest waits."
    )
    assert told(slots=4)["memory"] == (
        "Memory is no limit: 10 answers of the full 1,600 tokens fit."
    )


@pytest.mark.parametrize("lacking", ["model", "slots", "kv"])
def test_without_an_engine_there_is_no_advice(lacking: str) -> None:
    assert slots_advice(state(**{lacking: None})) is None
    page = Template("{% load capacity %}{% capacity_advice state %}")
    assert page.render(Context({"state": {"state": "unavailable"}})).strip() == ""
