"""``design/failures.md``: each row has a proof, and each proof exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TABLE = TESTS.parent / "design" / "failures.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in TABLE.read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| what fails")
]


@cache
def functions_of(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row(row: list[str]) -> None:
    what, tree_does, _, proof = row
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", proof)
    assert named or (proof.rstrip(" |") == "–" and re.match("nothing|is the same as that", tree_does)), what
    for file, name in named:
        assert name.startswith("test_") and name in functions_of(TESTS / file), f"there is no {file}::{name}"
    assert len(named) == proof.count("::"), proof


def test_there_are_rows() -> None:
    assert len(ROWS) > 30
