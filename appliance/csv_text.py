"""Tables for spreadsheets. Every CSV that leaves the server is written here."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

# A text that begins so is run as a formula, and names, models and faults may begin so.
# The wide forms count in spreadsheets of East Asian languages.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def csv_text(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """One line for `heads` and one for each row; no text in it is a formula."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(heads)
    writer.writerows([_plain(cell) for cell in row] for row in rows)
    return out.getvalue()


def _plain(cell: Any) -> Any:
    """With a leading apostrophe a spreadsheet takes it for text. Numbers stay numbers."""
    if isinstance(cell, str) and cell.lstrip(" ").startswith(_FORMULA_STARTS):
        return f"'{cell}"
    return cell
