"""Usage by day and member: the pages and the files add up to the ledger."""

import csv
import io
import uuid
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from django.db.models import F, Sum
from django.test import Client

from appliance.accounts.models import User
from appliance.console.usage_drawing import BASE_Y, TOP_Y, usage_drawing
from appliance.quotas.limits import quota_day
from appliance.quotas.models import UsageRecord
from appliance.quotas.rollup import usage_roll_up
from appliance.quotas.usage import UsagePart, usage_parts
from appliance.quotas.usage_csv import COLUMNS, usage_csv

pytestmark = pytest.mark.django_db


@pytest.fixture
def ledger(alice: User, bob: User) -> None:
    record(alice, 100, days_ago=0)
    record(alice, 200, days_ago=0, source="api")
    record(bob, 4000, days_ago=1)
    record(bob, 500, days_ago=29)
    record(bob, 99_000, days_ago=30)


def record(user: User, tokens: int, *, days_ago: int, source: str = "chat") -> None:
    UsageRecord.objects.create(
        reservation_id=uuid.uuid4(),
        request_id="r-1",
        user=user,
        username=user.username,
        source=source,
        model="scripted",
        prompt_tokens=tokens - 10,
        cached_tokens=tokens // 4,
        completion_tokens=10,
        queue_s=0,
        duration_s=1,
        end="stop",
        day=quota_day() - timedelta(days=days_ago),
    )


def rows_of(answer: Any) -> list[dict[str, str]]:
    assert answer["Content-Type"].startswith("text/csv")
    assert "attachment" in answer["Content-Disposition"]
    return list(csv.DictReader(io.StringIO(answer.content.decode())))


def test_the_file_for_admins_adds_up_to_the_ledger_of_30_days(admin: Client, ledger: None) -> None:
    rows = rows_of(admin.get("/console/usage/usage.csv"))
    assert tuple(rows[0]) == COLUMNS
    in_time = UsageRecord.objects.filter(day__gt=quota_day() - timedelta(days=30))
    tokens = in_time.aggregate(n=Sum(F("prompt_tokens") + F("completion_tokens")))["n"]
    assert sum(int(row["tokens"]) for row in rows) == tokens == 4800
    assert sum(int(row["requests"]) for row in rows) == 4
    assert [(r["member"], r["source"]) for r in rows] == [
        ("alice", "api"),
        ("alice", "chat"),
        ("bob", "chat"),
        ("bob", "chat"),
    ]


def test_a_member_gets_the_own_rows_only(bob: User, ledger: None) -> None:
    client = Client(headers={"host": "localhost"})
    client.force_login(bob)
    rows = rows_of(client.get("/account/usage.csv"))
    assert {row["member"] for row in rows} == {"bob"}
    assert sum(int(row["tokens"]) for row in rows) == 4500
    assert client.get("/console/usage/usage.csv").status_code == 403


def test_the_page_for_all_and_for_one(admin: Client, ledger: None) -> None:
    html = admin.get("/console/usage/").content.decode()
    assert "4,800 tokens in 4 requests" in html
    assert "Highest: 4,000" in html
    assert "style=" not in html
    html = admin.get("/console/usage/?member=alice").content.decode()
    assert "300 tokens in 2 requests" in html
    html = admin.get("/console/usage/?member=%3Cnobody%3E").content.decode()
    assert "Nothing was used" in html
    assert "<nobody>" not in html


def test_an_empty_ledger(admin: Client) -> None:
    assert "Nothing was used" in admin.get("/console/usage/").content.decode()
    assert rows_of(admin.get("/console/usage/usage.csv")) == []


def test_rows_of_a_member_who_is_gone_still_count(admin: Client, bob: User, ledger: None) -> None:
    bob.delete()
    rows = rows_of(admin.get("/console/usage/usage.csv"))
    assert sum(int(row["tokens"]) for row in rows) == 4800


def test_days_are_those_of_the_teams_time_zone(settings: Any) -> None:
    late = datetime(2026, 3, 1, 23, 30, tzinfo=UTC)
    settings.TIME_ZONE = "Europe/Berlin"
    assert quota_day(late) == date(2026, 3, 2)


def test_a_name_that_would_be_a_formula_is_text_in_a_spreadsheet() -> None:
    part = UsagePart(
        day=date(2026, 1, 2),
        username="=cmd|x",
        source="chat",
        key_prefix="bh_abcd",
        model="-m",
        num_requests=1,
        prompt_tokens=2,
        cached_tokens=0,
        completion_tokens=3,
    )
    assert "2026-01-02,'=cmd|x,chat,bh_abcd,'-m,1,2,0,3,5" in usage_csv([part])


def test_bars_fill_the_drawing_and_stand_on_its_ground(ledger: None) -> None:
    drawing = usage_drawing(usage_parts(), quota_day(), 30)
    assert drawing is not None
    assert len(drawing.bars) == 30
    today, yesterday = drawing.bars[-1], drawing.bars[-2]
    # 4,000 of 4,000, as the axis ends at a number that reads well.
    assert drawing.top_tokens == 4000
    assert yesterday.chat_y == TOP_Y
    assert today.chat_y + today.chat_height == pytest.approx(BASE_Y, abs=0.11)
    assert today.other_y + today.other_height == pytest.approx(today.chat_y, abs=0.11)
    assert today.label == "today"
    assert all(bar.x > 36 and bar.x + 20 < 900 for bar in drawing.bars)


def test_the_year_comes_from_the_roll_ups_and_adds_up_too(admin: Client, ledger: None) -> None:
    usage_roll_up()
    html = admin.get("/console/usage/?days=360").content.decode()
    assert "103,800 tokens in 5 requests" in html
    assert "By month" in html
    assert "Tokens in 12 days for the last 360 days" in html
    rows = rows_of(admin.get("/console/usage/usage.csv?days=360"))
    assert sum(int(row["tokens"]) for row in rows) == 103_800
    # Old days are read from the roll-ups alone.
    UsageRecord.objects.filter(day__lt=quota_day() - timedelta(days=5)).delete()
    assert "103,800 tokens in 5 requests" in admin.get("/console/usage/?days=360").content.decode()
    assert "4,800 tokens in 4 requests" in admin.get("/console/usage/?days=90x").content.decode()


def test_the_last_hours_are_shown_by_hour(admin: Client, ledger: None) -> None:
    for _ in range(2):
        html = admin.get("/console/usage/?days=1").content.decode()
        # All of the ledger was booked just now, whatever day was charged.
        assert "103,800 tokens in 5 requests" in html
        assert "By hour" in html
        assert "Tokens an hour for the last 24 hours" in html
        usage_roll_up()


def test_several_days_share_a_bar() -> None:
    part = {"username": "bob", "num_requests": 1, "prompt_tokens": 1, "cached_tokens": 0}
    today = date(2026, 6, 30)
    parts = [
        UsagePart(day=today, source="chat", completion_tokens=0, **part),
        UsagePart(day=today - timedelta(days=2), source="api", completion_tokens=1, **part),
        UsagePart(day=today - timedelta(days=3), source="chat", completion_tokens=3, **part),
        UsagePart(day=today - timedelta(days=89), source="chat", completion_tokens=2, **part),
        UsagePart(day=today - timedelta(days=90), source="chat", completion_tokens=99, **part),
    ]
    drawing = usage_drawing(parts, today, 90)
    assert drawing is not None
    tokens = [bar.title.partition(": ")[2] for bar in drawing.bars]
    assert [tokens[0], tokens[-2], tokens[-1]] == ["3 tokens", "4 tokens", "3 tokens"]
    assert drawing.bars[-1].title.startswith("28 Jun to 30 Jun")
    assert drawing.top_tokens == 4
