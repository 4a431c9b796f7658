"""Figures as text: the terminal's table, and CSV."""

import csv
import io
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from appliance.capacity.figures import Level
from appliance.capacity.recommend import Limits, faults, milliseconds, number, seconds

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
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, "is_good"])
    for level in sorted(levels, key=lambda one: one.users):
        found: dict[str, Any] = level.as_dict()
        values = [_plain(found[name]) for name in names]
        writer.writerow([*values, not faults(level, limits)])
    return out.getvalue()


def _plain(value: Any) -> Any:
    """Text that a spreadsheet would take for a formula is quoted."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value
