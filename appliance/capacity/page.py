"""A test as the page shows it: words and rows, ready for the template."""

from collections.abc import Mapping, Sequence
from typing import Any

from django.utils import timezone

from appliance.capacity.figures import Level
from appliance.capacity.mix import NAMES
from appliance.capacity.models import CapacityRun
from appliance.capacity.plan import Plan
from appliance.capacity.recommend import Advice, faults, milliseconds, number, seconds
from appliance.capacity.selectors import advice_of, levels_of
from appliance.capacity.services import SLOW_PICK_UP
from appliance.capacity.table import gibibytes
from appliance.errors import EngineUnavailable
from appliance.serving.gateway import get_backend
from appliance.serving.live_settings import live_state


def engine_state() -> Mapping[str, Any]:
    """The engine's state; empty without one."""
    try:
        return live_state(get_backend())
    except EngineUnavailable:
        return {}


def slots_now(state: Mapping[str, Any]) -> int | None:
    return (state.get("slots") or {}).get("effective")


def shown(run: CapacityRun, now: int | None) -> dict[str, Any]:
    """Everything about one test."""
    levels, plan, server = levels_of(run), Plan.from_dict(run.plan), run.facts.get("server", "")
    advice = advice_of(run, levels, None if server else now)
    mix, model = NAMES.get(plan.mix, plan.mix), run.facts.get("model") or "no model"
    title = advice.title
    if server and advice.users is not None:
        title = f"{server} is good up to {advice.users}"
    return {
        "run": run,
        "advice": advice,
        "title": title,
        "mix": mix,
        "lengths": _lengths(run.facts),
        # What a comparison needs to be fair.
        "subject": f"{mix} with {model}{f' on {server}' if server else ''}",
        "rows": [_row(level, plan, advice) for level in levels],
        "can_apply": not server and _can_apply(advice, now),
        "chart": chart(levels, plan, advice),
    }


def _lengths(facts: Mapping[str, Any]) -> str:
    prompt, answer = facts.get("median_prompt"), facts.get("median_answer")
    if prompt is None or answer is None:
        return ""
    return f", median prompt {prompt:,.0f} tokens, answer {answer:,.0f}"


def _can_apply(advice: Advice, now: int | None) -> bool:
    if advice.users is None or advice.users == now:
        return False
    # Fewer slots than now only where more were measured to be too slow.
    return advice.fails_at is not None or now is None or now < advice.users


def listed(run: CapacityRun) -> dict[str, Any]:
    """One line of the list of tests."""
    users = advice_of(run, levels_of(run)).users
    outcome = run.get_status_display()
    if run.status == CapacityRun.Status.DONE:
        outcome = "too slow" if users is None else f"good up to {users}"
    return {
        "run": run,
        "outcome": outcome,
        "is_done": run.status == CapacityRun.Status.DONE,
        "server": run.facts.get("server", ""),
    }


def chart(levels: Sequence[Level], plan: Plan, advice: Advice) -> dict[str, Any]:
    return {
        "limit": plan.limits.ttft_p95_s,
        "best": advice.users,
        "knee": advice.knee,
        "points": [
            {
                "users": level.users,
                "speed": level.tokens_per_s,
                "ttft": level.ttft_p95_s,
                "good": not faults(level, plan.limits),
            }
            for level in levels
            if level.ttft_p95_s is not None
        ],
    }


def compared(one: CapacityRun, other: CapacityRun) -> list[dict[str, Any]]:
    """A row for each level that either has: figures of both, and the change of speed."""
    first = {level.users: level for level in levels_of(one)}
    second = {level.users: level for level in levels_of(other)}
    rows = []
    for users in sorted(first.keys() | second.keys()):
        pair = (first.get(users), second.get(users))
        rows.append(
            {
                "users": users,
                "ttft": [seconds(level and level.ttft_p95_s) for level in pair],
                "itl": [milliseconds(level and level.itl_p95_s) for level in pair],
                "speed": ["–" if level is None else number(level.tokens_per_s) for level in pair],
                "change": _change(*pair),
            }
        )
    return rows


def status(run: CapacityRun) -> dict[str, Any]:
    """What the page asks for every second while the test runs."""
    waited = timezone.now() - run.created_at
    is_queued = run.status == CapacityRun.Status.QUEUED
    return {
        "status": run.status,
        "is_open": run.is_open,
        "is_stopping": run.stop_asked,
        "is_left": is_queued and waited > SLOW_PICK_UP,
        "progress": run.progress,
        "level_s": run.plan["level_s"],
        "levels": list(run.plan["levels"]),
        "done": [
            {"users": level.users, "ttft_p95_s": level.ttft_p95_s} for level in levels_of(run)
        ],
    }


def _row(level: Level, plan: Plan, advice: Advice) -> dict[str, Any]:
    bad = faults(level, plan.limits)
    return {
        "level": level,
        "bad": bad,
        "is_best": level.users == advice.users,
        "is_knee": level.users == advice.knee,
        "ttft": seconds(level.ttft_p95_s),
        "itl": milliseconds(level.itl_p95_s),
        "speed": number(level.tokens_per_s),
        "each": number(level.user_tokens_per_s),
        "queue": seconds(level.queue_p95_s),
        "kv": _share(level.kv_share),
        "memory": gibibytes(level.memory_bytes),
    }


def _share(share: float | None) -> str:
    if share is None:
        return "–"
    return "<1 %" if 0 < share < 0.005 else f"{share * 100:.0f} %"


def _change(one: Level | None, other: Level | None) -> str:
    if one is None or other is None or other.tokens_per_s <= 0:
        return "–"
    change = round(100 * (one.tokens_per_s / other.tokens_per_s - 1))
    return "same" if change == 0 else f"{change:+d} %".replace("-", "−")
