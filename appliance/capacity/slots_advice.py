"""What to set the slots to: what the last test found, and what memory carries. Blocking."""

from collections.abc import Mapping
from typing import Any

from appliance.capacity.models import CapacityRun
from appliance.capacity.page import shown
from appliance.console.models import AuditRecord

# Tests that are looked through for one of this model.
_LOOKED_AT = 50


def slots_advice(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """For the tuning page: a title that answers, why, what to press. None without an engine."""
    model, slots, kv = (state.get(name) or {} for name in ("model", "slots", "kv"))
    if not model or not slots.get("effective") or not kv.get("blocks_total"):
        return None
    told = {"memory": _memory(state, slots["effective"], kv)}
    tests = _own_tests()
    run = next((test for test in tests if test.facts.get("model") == model["name"]), None)
    if run is None:
        of_other = str(tests[0].facts.get("model") or "") if tests else ""
        return {**told, **_unmeasured(slots, of_other), "is_measured": False}
    found = shown(run, slots["effective"])
    since = AuditRecord.objects.filter(action="engine.tune", at__gt=run.ended_at)
    return {
        **told,
        "title": found["title"],
        "text": found["advice"].text,
        "is_measured": True,
        "is_good": found["advice"].users is not None,
        "run": run,
        "mix": found["mix"],
        "suggested": found["advice"].users if found["can_apply"] else None,
        # The test's own advice is no reason to doubt it.
        "is_old": since.exclude(target="slots").exists(),
    }


def _own_tests() -> list[CapacityRun]:
    """The newest whole tests of this server, the newest first."""
    done = CapacityRun.objects.filter(status=CapacityRun.Status.DONE, ended_at__isnull=False)
    return [run for run in done[:_LOOKED_AT] if not run.facts.get("server")]


def _unmeasured(slots: Mapping[str, Any], of_other: str) -> dict[str, Any]:
    number = slots["effective"]
    if slots.get("requested") == "auto":
        title = f"Leave the slots at auto, {number} now, until you have measured"
        text = f"The server chose {number}: {str(slots.get('reason') or 'as it fits').rstrip('.')}."
    elif of_other:
        title, text = f"You run {_many(number, 'slot')}, not measured with this model", ""
    else:
        title, text = f"You run {_many(number, 'slot')}, and nobody has measured what is best", ""
    if of_other:
        text += f" The last test was with {of_other} and says nothing of this model."
    text += " How many answers at the same time are still quick, a test tells in a few minutes."
    return {"title": title, "text": text.strip()}


def _memory(state: Mapping[str, Any], slots: int, kv: Mapping[str, Any]) -> str:
    setting = (state.get("settings") or {}).get("max_model_len") or {}
    context = setting.get("effective") or state["model"]["context_tokens"]
    room = kv["blocks_total"] * kv["block_size"]
    whole = kv["blocks_total"] // -(-context // kv["block_size"])
    if whole >= slots:
        return f"Memory is no limit: {_many(whole, 'answer')} of the full {context:,} tokens fit."
    return (
        f"Memory has room for {room // slots:,} tokens in each of {_many(slots, 'slot')}, or for "
        f"{_many(whole, 'answer')} of the full {context:,}. When it is full, the newest waits."
    )


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
