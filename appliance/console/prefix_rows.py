"""Beginnings of prompts that were found again, as consoles get them: whose, how long, how often.

Lengths and counts only: no text leaves the engine, and an admin needs none to see what is saved.
"""

from collections.abc import Iterable, Mapping
from typing import Any

# Owner of what the server itself put before the prompts, which everybody's requests find.
EVERYBODY = ""


def prefix_rows(prefixes: Iterable[Mapping[str, Any]]) -> list[list[Any]]:
    """[owner, tokens, times found, tokens not computed again], those that saved the most first."""
    rows = [
        [
            str(each["scope"] or EVERYBODY).removeprefix("user:"),
            each["num_tokens"],
            each["num_hits"],
            each["num_tokens_saved"],
        ]
        for each in prefixes
    ]
    return sorted(rows, key=lambda row: -row[3])
