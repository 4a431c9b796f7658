"""Figures as text: the terminal's table, and CSV."""

from collections.abc import Sequence
from dataclasses import fields

from appliance.capacity.figures import Level
from appliance.capacity.recommend import Limits, faults, milliseconds, number, seconds
from appliance.csv_text import csv_text

HEADS = (
    "N", "requests", "failed", "TTFT p50", "TTFT p95", "ITL p50", "ITL p95", "tok/s", "tok/s each",
    "queue p95", "memory", "verdict",
)  # fmt: skip


def cells(level: Level, limits: Limits) -> tuple[str, ...]:
    return (
        str(level.users),
        str(level.requests),
        str(level.errors),
        seconds(level.ttft_p50_s),
        seconds(level.ttft_p95_s),
        milliseconds(level.itl_p50_s),
        milliseconds(level.itl_p95_s),
        number(level.tokens_per_s),
        number(level.user_tokens_per_s),
        seconds(level.queue_p95_s),
        gibibytes(level.memory_bytes),
        "too slow" if faults(level, limits) else "good",
    )


def gibibytes(number_of_bytes: int | None) -> str:
    if number_of_bytes is None:
        return "–"
    return f"{number_of_bytes / 2**30:.1f} GiB"


def table(levels: Sequence[Level], limits: Limits) -> str:
    rows = [HEADS, *(cells(level, limits) for level in sorted(levels, key=lambda one: one.users))]
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEADS))]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
        for row in rows
    )


def as_csv(levels: Sequence[Level], limits: Limits) -> str:
    """One row a level; every stored figure, and whether it is good."""
    names = [field.name for field in fields(Level)]
    rows = []
    for level in sorted(levels, key=lambda one: one.users):
        found = level.as_dict()
        rows.append([*(found[name] for name in names), not faults(level, limits)])
    return csv_text([*names, "is_good"], rows)
