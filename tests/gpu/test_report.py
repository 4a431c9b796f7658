"""The GPU script's verdict: what fails is named, ends nothing else, and decides the exit status."""

import pytest

from tests.gpu.report import BUDGET_S, Report


def fails() -> str:
    raise AssertionError("not near")


def test_a_failed_check_fails_the_script_and_the_next_one_runs(capsys) -> None:
    report = Report()
    report.check("first", fails)
    report.check("second", lambda: "fine")
    report.print("title")
    shown = capsys.readouterr().out
    assert report.has_failed
    assert "not near" in shown
    assert "fine" in shown
    assert "correctness: FAILED" in shown


def test_a_timing_that_fails_is_named_without_failing_correctness(capsys) -> None:
    report = Report()
    report.measure("speed", fails)
    report.print("title")
    assert not report.has_failed
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "has_failed"), [("check", True), ("measure", False)])
def test_what_no_time_is_left_for_is_not_passed_off_as_held(kind, has_failed) -> None:
    report = Report()
    report.started_s -= BUDGET_S + 1
    getattr(report, kind)("late", fails)
    assert report.rows == [("late", "not run", "no time was left")]
    assert report.has_failed is has_failed
