"""The console's memory of requests: phases with their times, ends, and what events add."""

from typing import Any

from appliance.console.picture import NEVER, Picture
from appliance.console.request_log import (
    DECODE,
    FIELDS,
    KEEP_ENDED_S,
    PREEMPTED,
    PREFILL,
    QUEUED,
    RequestLog,
)


def info(request_id: str = "r-1", **values: Any) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "owner": "user:7",
        "labels": {"username": "bob", "user_id": "7", "source": "api", "key_prefix": "bh_7Qk2"},
        "request_class": "api",
        "state": "waiting",
        "slot": None,
        "num_prompt_tokens": 100,
        "num_cached_tokens": 0,
        "num_computed_tokens": 0,
        "num_output_tokens": 0,
        "num_blocks": 0,
        "num_own_blocks": 0,
        "queue_position": None,
        "age_s": 0.0,
        "ttft_s": None,
        "tokens_per_s": None,
        "num_preemptions": 0,
        "wait": None,
        **values,
    }


def event(kind: str, at: float, request_id: str = "r-1", **data: Any) -> dict[str, Any]:
    labels = {"username": "bob", "user_id": "7", "source": "chat"}
    return {"kind": kind, "at": at, "request_id": request_id, "labels": labels, "data": data}


def segments(log: RequestLog, request_id: str = "r-1") -> list[tuple[float, ...]]:
    row = log.find(request_id)
    assert row is not None
    flat = row.get("segments")
    return [tuple(flat[at : at + 3]) for at in range(0, len(flat), 3)]


def test_a_request_is_followed_through_its_phases() -> None:
    log = RequestLog()
    log.observe([info(queue_position=0, age_s=1.0)], 1, now=10.0, tick=1)
    log.observe([info(state="prefill", slot=2)], 0, now=12.0, tick=2)
    log.observe([info(state="decode", slot=2, ttft_s=4.0)], 0, now=13.5, tick=3)
    log.observe([info(state="preempted", queue_position=0)], 1, now=15.0, tick=4)
    log.observe([info(state="decode", slot=0, ttft_s=4.0)], 0, now=16.0, tick=5)
    # Waiting counts from the arrival, the answer from its first token: both are known exactly.
    assert segments(log) == [
        (QUEUED, -1, 9.0),
        (PREFILL, 2, 12.0),
        (DECODE, 2, 13.0),
        (PREEMPTED, 2, 15.0),
        (DECODE, 0, 16.0),
    ]
    log.observe([], 0, now=18.0, tick=6)
    row = log.find("r-1")
    assert row is not None
    assert (row.ended, row.get("reason"), row.get("owner")) == (18.0, "stop", "7")
    assert row.get("from") == "key bh_7Qk2"


def test_a_prompt_read_between_two_looks_still_has_its_bar() -> None:
    log = RequestLog()
    log.observe([info(state="decode", slot=1, age_s=0.9, ttft_s=0.4)], 0, now=5.0, tick=1)
    assert segments(log) == [(PREFILL, 1, 4.1), (DECODE, 1, 4.5)]


def test_a_request_too_short_for_any_look_is_known_from_its_events() -> None:
    log = RequestLog()
    log.observe_event(event("admitted", 3.0, queue_s=0.5, slot=1, cached_tokens=48), 3.0, tick=1)
    end = event("finished", 3.1, reason="length", prompt_tokens=60, output_tokens=4, seconds=0.6)
    log.observe_event(end, 3.1, tick=1)
    log.observe([], 0, now=3.2, tick=1)
    row = log.find("r-1")
    assert row is not None
    known = {name: row.get(name) for name in ("since", "ended", "reason", "prompt", "written")}
    assert known == {"since": 2.5, "ended": 3.1, "reason": "length", "prompt": 60, "written": 4}
    assert (row.get("cached"), segments(log)) == (48, [(PREFILL, 1, 3.0)])


def test_a_waiting_request_past_the_end_of_the_list_has_not_ended() -> None:
    log = RequestLog()
    log.observe([info("r-1", queue_position=0), info("r-2", queue_position=1)], 2, 1.0, tick=1)
    log.observe([info("r-3", queue_position=0), info("r-1", queue_position=1)], 3, 2.0, tick=2)
    row = log.find("r-2")
    assert row is not None
    assert row.ended is None
    log.observe_event(event("aborted", 2.5, "r-2", reason="abort", output_tokens=0), 2.5, tick=3)
    log.observe([info("r-3", queue_position=0), info("r-1", queue_position=1)], 2, 3.0, tick=3)
    assert (row.ended, row.get("reason")) == (2.5, "abort")


def test_ended_requests_are_forgotten_after_a_while() -> None:
    log = RequestLog()
    log.observe([info()], 0, now=1.0, tick=1)
    log.observe([], 0, now=2.0, tick=2)
    assert log.find("r-1") is not None
    log.observe([], 0, now=3.0 + KEEP_ENDED_S, tick=3)
    assert log.find("r-1") is None


def test_a_delta_holds_changed_fields_only() -> None:
    log = RequestLog()
    log.observe([info(state="decode", slot=0, num_output_tokens=5)], 0, now=1.0, tick=1)
    log.observe([info(state="decode", slot=0, num_output_tokens=6)], 0, now=1.2, tick=2)
    assert log.delta_since(1, 1.2) == [[0, FIELDS.index("written"), 6]]
    assert log.delta_since(2, 1.2) == []


# ---- events in words


def told(*events: dict[str, Any], now: float = 10.0) -> list[str]:
    picture = Picture()
    picture.observe({}, None, events, now=now, epoch=0.0)
    return [entry[4] for entry in picture.delta_since(NEVER).get("events", [])]


def test_events_say_what_happened_and_why() -> None:
    preempted = event("preempted", 1.0, tokens_lost=312, blocks=20, setting="slots", value=6)
    failed = event("failed", 1.0, reason="error", detail="The logits are not numbers.")
    step = event("failed", 1.0, error="RuntimeError: no memory", num_requests=3)
    assert told(preempted, failed, step) == [
        "bob's request was preempted (312 tokens recomputed): the pool was full. "
        "6 slots would have fitted.",
        "bob's request failed: The logits are not numbers.",
        "A step of the model with 3 requests failed: RuntimeError: no memory.",
    ]
    stopped = event("aborted", 1.0, reason="abort", detail="", output_tokens=96)
    rejected = event("rejected", 1.0, why="QueueFull", num_rejected=1)
    reused = event("admitted", 1.0, cached_tokens=4096, queue_s=0.0, slot=0)
    weights = event("tuned", 1.0, class_weights="interactive 4, api 1", max_model_len="4096")
    assert told(weights) == [
        "Shares of kinds of requests: now chat 4, scripts 1; Context limit: now 4,096."
    ]
    assert told(stopped, rejected, reused, event("tuned", 1.0, slots="6")) == [
        "bob's answer was stopped after 96 tokens.",
        "bob's request was turned away: the waiting line is full.",
        "bob's prompt reused 4,096 tokens from the cache.",
        "Parallel slots: now 6.",
    ]


def test_a_preemption_names_the_setting_that_would_avoid_it() -> None:
    picture = Picture()
    preempted = event("preempted", 1.0, tokens_lost=312, blocks=20, setting="slots", value=6)
    state = {"slots": {"requested": 12, "effective": 12, "reason": ""}}
    picture.observe(state, None, [preempted], now=10.0, epoch=0.0)
    [told] = [entry[4] for entry in picture.delta_since(NEVER)["events"]]
    assert told == (
        "bob's request was preempted (312 tokens recomputed): the pool was full. 12 slots are 6 "
        "more than the memory carries at this length; with 6 it would not have happened."
    )


def test_a_preemption_for_a_users_cap_says_so_and_not_that_the_pool_was_full() -> None:
    capped = {"tokens_lost": 64, "blocks": 4, "setting": "max_blocks_per_owner", "value": 10}
    assert told(event("preempted", 1.0, **capped)) == [
        "bob's request was preempted (64 tokens recomputed): bob's answers had grown to the most "
        "blocks that one user may have. 10 blocks would have done."
    ]


def test_why_a_request_waits_reaches_the_page_and_goes_when_it_starts() -> None:
    log = RequestLog()
    short = {"why": "memory", "needed": 994, "available": 983, "kept": 205}
    log.observe([info(queue_position=0, wait=short)], 1, now=1.0, tick=1)
    row = log.find("r-1")
    assert row is not None
    assert row.get("wait") == ["memory", 994, 983, 205]
    log.observe([info(queue_position=0, wait={"why": "slots", "needed": 994})], 1, 2.0, tick=2)
    assert row.get("wait") == ["slots", 994]
    log.observe([info(state="prefill", slot=0)], 0, now=3.0, tick=3)
    assert row.get("wait") is None


def test_a_long_wait_for_memory_is_told_once_with_its_numbers() -> None:
    picture = Picture()
    wait = {"why": "memory", "needed": 994, "available": 983, "kept": 205}
    for age in range(6):
        waiting = info(queue_position=0, wait=wait, age_s=float(age))
        picture.observe({"requests": [waiting]}, None, [], now=float(age), epoch=0.0)
    assert [entry[4] for entry in picture.delta_since(NEVER)["events"]] == [
        "bob's request waits: it needs 994 blocks, and 983 can be given out. 205 of them are kept "
        "so that running answers can grow."
    ]


def test_what_is_no_news_has_no_line() -> None:
    ordinary = event("admitted", 1.0, cached_tokens=16, queue_s=0.0, slot=0)
    ended = event("finished", 1.0, reason="stop", output_tokens=9, prompt_tokens=4, seconds=1.0)
    assert told(ordinary, ended, event("a kind of a later version", 1.0)) == []


def test_a_stream_of_evictions_is_one_line_with_their_sum() -> None:
    picture = Picture()
    for second in range(100):
        given = event("evicted", float(second), blocks=2)
        picture.observe({}, None, [given], now=float(second), epoch=0.0)
    texts = [entry[4] for entry in picture.delta_since(NEVER)["events"]]
    assert len(texts) == 4
    assert texts[1] == "60 cached blocks were given away to make room, oldest first."


def test_beginnings_of_prompts_are_told_by_owner_and_the_owners_are_looked_up() -> None:
    picture = Picture()
    prefixes = [
        {"scope": "user:7", "num_tokens": 32, "num_hits": 2, "num_tokens_saved": 64},
        {"scope": "", "num_tokens": 48, "num_hits": 9, "num_tokens_saved": 432},
    ]
    picture.observe({"prefixes": prefixes}, None, [], now=1.0, epoch=0.0)
    assert picture.delta_since(NEVER)["state"]["prefixes"] == [["", 48, 9, 432], ["7", 32, 2, 64]]
    assert picture.unknown_owners() == {"7"}
    picture.put_users({"7": ["bob", 1, 0]})
    assert picture.unknown_owners() == set()


def of_test(told: dict[str, Any], key: int = 1) -> dict[str, Any]:
    labels = {"username": "alice", "user_id": "1", "source": "capacity", "key_id": str(key)}
    return {**told, "labels": labels}


def test_all_requests_of_a_capacity_test_are_one_line_and_members_keep_theirs() -> None:
    """Also what is stopped at the ends of its levels, however long the test was silent before."""
    picture = Picture()
    wait = {"why": "memory", "needed": 994, "available": 983, "kept": 205}
    kinds = ("admitted", "preempted", "rejected", "finished")
    for level in range(4):
        at = level * 500.0
        sent = [of_test(event(kind, at, f"t-{n}")) for n in range(20) for kind in kinds]
        ends = [
            of_test(event("aborted", at + 400, f"t-{n}", detail="", output_tokens=n))
            for n in range(20)
        ]
        stopped = event("aborted", at, "r-1", reason="abort", detail="", output_tokens=level + 2)
        waiting = of_test(info("t-1", queue_position=0, wait=wait, age_s=9.0))
        picture.observe(
            {"requests": [waiting]}, None, [*sent, stopped, *ends], now=at + 400, epoch=0.0
        )
    other = [of_test(event("admitted", 2000.0, "t-new"), key=2)]
    picture.observe({}, None, other, now=2000.0, epoch=0.0)
    sends = "A capacity test of alice sends requests. They are not told here one by one."
    assert [entry[4] for entry in picture.delta_since(NEVER)["events"]] == [
        sends,
        *(f"bob's answer was stopped after {level + 2} tokens." for level in range(4)),
        sends,
    ]


def test_the_first_failure_in_a_capacity_test_is_told() -> None:
    failed = of_test(event("failed", 1.0, detail="The logits are not numbers."))
    sends = "A capacity test of alice sends requests. They are not told here one by one."
    why = "alice's request failed: The logits are not numbers."
    assert told(failed, failed, of_test(event("admitted", 2.0))) == [sends, why]
