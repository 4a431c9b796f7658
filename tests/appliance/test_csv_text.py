"""No cell of a table that leaves the server is run as a formula by a spreadsheet."""

import ast
import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest

import appliance
from appliance.capacity.recommend import Limits
from appliance.capacity.table import as_csv
from appliance.csv_text import csv_text
from tests.appliance.capacity.test_recommend import level

PACKAGE = Path(appliance.__file__).parent
FORMULAS = [f"{start}cmd|' /C calc'!A0" for start in ("=", "+", "-", "@", "\t", "\r", "\n", "＝")]


def read(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline="")))


@pytest.mark.parametrize("text", [*FORMULAS, "  =1+1", '=HYPERLINK("http://x","y")', "-"])
def test_a_text_that_would_be_a_formula_stays_text(text: str) -> None:
    assert read(csv_text(["name"], [[text]])) == [["name"], [f"'{text}"]]


@pytest.mark.parametrize("cell", ["alice", "a=b", "a-b", "", "'=1", 5, -3, -0.5, True])
def test_other_texts_and_numbers_are_as_they_were(cell: object) -> None:
    assert read(csv_text(["name"], [[cell]]))[1:] == ([[str(cell)]])


def test_a_fault_of_a_measured_server_is_no_formula() -> None:
    hostile = replace(level(2, 0.1, 0.1, 1.0), errors=1, first_error="=cmd|x")
    assert "'=cmd|x" in as_csv([hostile], Limits())


def test_nothing_else_writes_such_a_table() -> None:
    def imports_csv(path: Path) -> bool:
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        return any(
            (isinstance(node, ast.Import) and any(name.name == "csv" for name in node.names))
            or (isinstance(node, ast.ImportFrom) and node.module == "csv")
            for node in nodes
        )

    found = {
        path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if imports_csv(path)
    }
    assert found == {"csv_text.py"}
