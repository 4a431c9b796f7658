"""The ledger as a table for spreadsheets."""

from collections.abc import Iterable

from appliance.csv_text import csv_text
from appliance.quotas.usage import UsagePart

COLUMNS = (
    "day",
    "member",
    "source",
    "key",
    "model",
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "answer_tokens",
    "tokens",
)


def usage_csv(parts: Iterable[UsagePart]) -> str:
    rows = (
        (
            part.day.isoformat(),
            part.username,
            part.source,
            part.key_prefix,
            part.model,
            part.num_requests,
            part.prompt_tokens,
            part.cached_tokens,
            part.completion_tokens,
            part.tokens,
        )
        for part in parts
    )
    return csv_text(COLUMNS, rows)
