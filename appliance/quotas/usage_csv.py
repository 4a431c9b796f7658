"""The ledger as a table for spreadsheets."""

import csv
import io
from collections.abc import Iterable

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
# A cell that begins so is a formula for a spreadsheet, and names may begin so.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def usage_csv(parts: Iterable[UsagePart]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for part in parts:
        writer.writerow(
            (
                part.day.isoformat(),
                _plain(part.username),
                _plain(part.source),
                _plain(part.key_prefix),
                _plain(part.model),
                part.num_requests,
                part.prompt_tokens,
                part.cached_tokens,
                part.completion_tokens,
                part.tokens,
            )
        )
    return text.getvalue()


def _plain(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text
